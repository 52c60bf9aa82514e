"""dask-jobqueue: workers in jobs compute a reduction, for which they send each other data; then they come and go."""

import json
import os
import sys
import time

import dask.array
from dask_jobqueue import SLURMCluster
from distributed import Client, wait


def said(number: int) -> str:
    """Run by a worker: the partition of its job, and a number."""
    return f"{os.environ['SLURM_JOB_PARTITION']} {number}"


partition, address = sys.argv[1:]
cluster = SLURMCluster(
    queue=partition,
    cores=1,
    processes=1,
    memory="1GiB",
    walltime="00:30:00",
    local_directory="/tmp",
    log_directory="logs",
    death_timeout=300,
    scheduler_options={"host": address, "dashboard_address": None},
)
with cluster, Client(cluster, timeout=300) as client:
    cluster.scale(jobs=2)
    client.wait_for_workers(2, timeout=500)
    numbers = dask.array.arange(400_000, chunks=50_000)
    pieces = client.persist((numbers * numbers) % 7)
    wait(pieces)
    holders = {worker for workers in client.who_has(pieces).values() for worker in workers}
    moved = dask.array.concatenate([pieces[::-1], pieces]).rechunk(400_000).sum()
    found = {
        "workers": len(client.scheduler_info()["workers"]),
        "holders": len(holders),
        "sum": int(client.compute(pieces.sum()).result()),
        "moved": int(client.compute(moved).result()),
        "said": client.gather(client.map(said, range(3))),
    }
    del pieces, moved
    cluster.scale(0)
    while client.scheduler_info()["workers"]:
        time.sleep(0.5)
    cluster.adapt(minimum=0, maximum=2, interval="1s", wait_count=3)
    found["adaptive"] = client.submit(sum, client.map(lambda number: number * number, range(100))).result(timeout=500)
    while client.scheduler_info()["workers"]:
        time.sleep(0.5)
print(json.dumps(found))
