"""An S3 server with one empty bucket, on a free port of this PC; its address is its first line."""

import sys
import threading

import boto3
from moto.server import ThreadedMotoServer

from tests.support.store_servers import BUCKET


def main() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket=BUCKET)
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
