"""The dashboard of a hub: a page, a versioned API and metrics, all fed by one record of the run."""
