"""How quickly the labelling page is answered while a fit runs, and how soon suggestions follow a label.

    python benchmarks/label_server.py --images FOLDER/wings [--labels 100] [--out results/speed/label-server.json]

FOLDER/wings has ``images.tar`` and ``points.csv``, as for ``tensor-dropout fit``. Its first 1,000 pictures are
unpacked, and ``tensor-dropout label`` is started on them. A SIMULATED person places the true points over HTTP: no page
is drawn. While fits run, the requests of a page are sent one after another; every answer is timed.
"""

import argparse
import csv
import http.client
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from tensor_dropout_lab.run_records import describe_environment, write_json

TOKEN = "benchmark-" * 4
CLIENT = "00000001"


class Page:
    """Asks the server as the page does, over one connection."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self.used = time.perf_counter()

    def ask(self, path, body=None):
        """The content of an answer, and the milliseconds until it was there."""
        data = None if body is None else json.dumps(body)
        if time.perf_counter() - self.used > 30:
            self.connection.close()  # the server does not keep it for ever; it is opened again
        began = self.used = time.perf_counter()
        self.connection.request("GET" if body is None else "POST", path, data, {"X-Token": TOKEN})
        answer = self.connection.getresponse()
        content = answer.read()
        taken = 1000 * (time.perf_counter() - began)
        assert answer.status == 200, content
        return content, taken

    def json(self, path, body=None):
        return json.loads(self.ask(path, body)[0])


class News(threading.Thread):
    """Listens to the events, and notes when they came."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.came = threading.Condition()
        self.messages = []
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
        connection.request("GET", f"/api/events?token={TOKEN}")
        self.stream = connection.getresponse()
        self.start()

    def run(self):
        for line in self.stream:
            if line.startswith(b"data: "):
                with self.came:
                    self.messages.append((time.perf_counter(), json.loads(line[6:])))
                    self.came.notify_all()

    def wait(self, is_it, after=0, seconds=900):
        """When the first such message came."""
        with self.came:
            found = self.came.wait_for(lambda: self._find(is_it, after), seconds)
        assert found, "the server says nothing"
        return found

    def _find(self, is_it, after):
        return next((when for when, message in self.messages if when > after and is_it(message)), None)


def unpack(images, folder, count):
    """The first pictures, and the true points of each, (P, 2)."""
    with (images / "points.csv").open() as stream:
        rows = list(csv.DictReader(stream))[:count]
    names = {row["file"] for row in rows}
    with tarfile.open(images / "images.tar") as archive:
        members = [member for member in archive if member.name.removeprefix("./") in names]
        archive.extractall(folder, members, filter="data")
    columns = [column for column in rows[0] if column not in ("file", "group")]
    return {row["file"]: np.array([float(row[column]) for column in columns]).reshape(-1, 2) for row in rows}


def place(image, points):
    listed = [{"point": k, "x": x, "y": y, "by": "hand"} for k, (x, y) in enumerate(points.tolist())]
    return {"client": CLIENT, "actions": [{"kind": "place", "image": image, "points": listed}]}


def measure_memory(pid):
    """MB: the largest that the server and its worker have had, added up."""
    children = [child.read_text().split() for child in Path(f"/proc/{pid}/task").glob("*/children")]
    total = 0
    for each in {str(pid)}.union(*children):
        status = Path(f"/proc/{each}/status").read_text()
        total += int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    return total / 1024


def summarize(times):
    return {
        "requests": len(times),
        "median_ms": float(np.median(times)),
        "p95_ms": float(np.quantile(times, 0.95)),
        "largest_ms": max(times),
    }


def is_fit(state):
    return lambda message: message["type"] == "fit" and message["state"] == state


def ask_while_fits_run(page, truth, images, seconds):
    """Milliseconds of the requests of a page, each repeated while fits run."""
    times = {name: [] for name in ("image", "action", "undo", "next", "picture", "statistics", "project")}
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        image = images[turn % len(images)]
        turn += 1
        points = truth[image["name"]][:1] + 0.001 * (turn % 7)
        for name, path, body in (
            ("image", f"/api/image/{image['id']}", None),
            ("picture", f"/pictures/{image['id']}?token={TOKEN}", None),
            ("action", "/api/actions", place(image["id"], points)),
            ("undo", "/api/undo", {"client": CLIENT}),
            ("next", f"/api/next?after={image['id']}&order=gain", None),
            ("statistics", "/api/statistics", None),
        ):
            times[name].append(page.ask(path, body)[1])
        if turn % 10 == 0:
            times["project"].append(page.ask("/api/project")[1])
        if page.json("/api/project")["progress"]["fit"]["state"] != "running":
            page.connection.request("POST", "/api/fit", "{}", {"X-Token": TOKEN})
            page.connection.getresponse().read()
    return times


def measure(options, folder):
    truth = unpack(options.images, folder, options.count)
    environment = os.environ | {"TENSOR_DROPOUT_LABEL_TOKEN": TOKEN}
    command = [sys.executable, "-m", "tensor_dropout_lab", "label", str(folder), "--no-browser"]
    command += ["--cache", str(options.cache or folder.parent / "cache")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = next(int(line.split(":")[2].partition("/")[0]) for line in process.stdout if "http://" in line)
            record = measure_session(options, process.pid, port, truth)
            began = time.perf_counter()
            process.send_signal(signal.SIGINT)
            process.wait(300)
            return {**record, "seconds_to_end": time.perf_counter() - began}
        finally:
            process.kill()


def measure_session(options, pid, port, truth):
    page, news, began = Page(port), News(port), time.perf_counter()
    n_points = len(next(iter(truth.values())))
    page.json("/api/names", {"client": CLIENT, "names": [f"p{number}" for number in range(n_points)]})
    images = page.json("/api/project")["images"]
    chosen = [images[k] for k in np.random.default_rng(0).permutation(len(images))]
    news.wait(lambda message: message["type"] == "progress" and message["done"] == message["total"])
    features = time.perf_counter() - began
    labelled, labels = chosen[: options.labels], []
    for image in labelled:
        labels.append(page.ask("/api/actions", place(image["id"], truth[image["name"]]))[1])
    sent = time.perf_counter()
    rounds_after = lambda: page.json("/api/statistics")["rounds"]  # noqa: E731
    while not any(entry["labelled"] == options.labels for entry in rounds_after()):
        news.wait(lambda message: message["type"] == "suggestions", after=sent)
        sent = time.perf_counter() - 1e-3
    news_after_label = []
    for image in chosen[options.labels : options.labels + options.repeats]:
        while page.json("/api/project")["progress"]["fit"]["state"] == "running":
            time.sleep(0.2)
        sent = time.perf_counter()
        page.ask("/api/actions", place(image["id"], truth[image["name"]]))
        news_after_label.append(news.wait(lambda message: message["type"] == "suggestions", after=sent) - sent)
    refits = [entry for entry in rounds_after() if entry["labelled"] > options.labels]
    others = chosen[options.labels + options.repeats :]
    times = ask_while_fits_run(page, truth, others, options.seconds)
    every = [taken for name in times for taken in times[name]]
    return {
        "images": len(images),
        "points": n_points,
        "labels": options.labels,
        "seconds_until_all_features": features,
        "features_may_be_cached": options.cache is not None,
        "action_without_a_fit_at_first_ms": summarize(labels),
        "while_fits_run_ms": {"all": summarize(every)} | {name: summarize(times[name]) for name in times},
        "refit_seconds": sorted(entry["seconds"] for entry in refits),
        "refit_cpu_seconds": sorted(entry["cpu_seconds"] for entry in refits),
        "label_to_suggestions_seconds": sorted(news_after_label),
        "load_of_the_machine": os.getloadavg()[0],
        "memory_mb": measure_memory(pid),
        "rounds": rounds_after(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder with images.tar and points.csv")
    parser.add_argument("--count", type=int, default=1000, help="pictures")
    parser.add_argument("--labels", type=int, default=100, help="labelled images at which refits are timed")
    parser.add_argument("--repeats", type=int, default=10, help="refits that are timed")
    parser.add_argument("--seconds", type=float, default=30, help="for which requests are sent while fits run")
    parser.add_argument("--cache", type=Path, help="keeps features for the next run; none: in a folder that goes")
    parser.add_argument("--out", type=Path, default=Path("results/speed/label-server.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="label-server-") as place_of_all:
        record = measure(options, Path(place_of_all) / "pictures")
    print(json.dumps({key: value for key, value in record.items() if key != "rounds"}, indent=1))
    environment = describe_environment("starlette", "uvicorn")
    for path in filter(None, (options.images, options.cache, options.out)):  # a record names no folder of a machine
        environment["command"] = environment["command"].replace(str(path), f"FOLDER/{path.name}")
    write_json(options.out, {**record, "environment": environment})
