"""Hubs that open a log in PostgreSQL, one after the other, without a training."""

from ravnest.config import StoreTimeouts
from ravnest.hub.service.postgres_address import PostgresAddress
from ravnest.hub.service.postgres_log import PostgresLog
from tests.support.store_servers import PostgresServer

QUICK = StoreTimeouts(pause_seconds=0.05, start_seconds=0.1)


def open_log(server: PostgresServer, hub: str, timeouts: StoreTimeouts = QUICK) -> PostgresLog:
    log = PostgresLog(PostgresAddress(server.address), hub, timeouts)
    log.open(takes_over=True)
    return log
