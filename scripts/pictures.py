#!/usr/bin/env python3
"""Draws the pictures of docs/benchmarks.md from the results of one run.

Usage: pictures.py RESULTS DIRECTORY. RESULTS is target/pictures, with the files of
scripts/pictures.sh. Needs matplotlib. Prints the tables of the page as Markdown.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

# Colours that differ for readers who do not see all of them (Okabe and Ito), with a marker each.
STYLES = {
    "ceiling": ("#000000", ".", "Ceiling: checks batches, stores nothing"),
    "helix": ("#0072B2", "o", "Helix, one node, synced"),
    "helix-three-nodes": ("#009E73", "s", "Helix, three nodes, synced on a majority"),
    "redis-always": ("#D55E00", "^", "Redis streams, fsync always"),
    "redis-everysec": ("#E69F00", "v", "Redis streams, fsync each second"),
    "jetstream-always": ("#CC79A7", "D", "JetStream, sync always"),
    "jetstream": ("#56B4E9", "X", "JetStream, default (no sync for 2 min)"),
}
CLIENTS = (1, 4, 16)

# The same file for the same results; text stays text.
matplotlib.rcParams.update({
    "svg.hashsalt": "helix", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11,
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "figure.figsize": (8, 4.6), "figure.facecolor": "white", "axes.axisbelow": True,
})


def load(path):
    return json.loads(path.read_text())


def ms(latency, name):
    """Latency in ms; the bench and the peers' client differ in the names of the high ones."""
    names = {"p999": ("p999", "p99_9"), "p9999": ("p9999", "p99_99")}.get(name, (name,))
    return next(latency[it] for it in names if it in latency) / 1000


def runs(results, setup, kind):
    """Results of a setup's loads of one kind, over its rounds."""
    return [load(path) for path in sorted(results.glob(f"{setup}.{kind}.*.json"))]


def median(values):
    return statistics.median(values) if values else None


def setups(results):
    return [it for it in STYLES if list(results.glob(f"{it}.closed-*.json"))]


def save(figure, directory, name):
    figure.savefig(directory / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def plain(value, _=None):
    """A number as a reader writes it: 1,500 or 0.25."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def logarithmic(axis):
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def legend(axes, columns=2):
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, frameon=False)


def p99_over_throughput(results, directory):
    figure, axes = plt.subplots()
    for setup in setups(results):
        colour, marker, label = STYLES[setup]
        points = []
        for kind in sorted({path.name.split(".", 1)[1].rsplit(".", 2)[0]
                            for path in results.glob(f"{setup}.open-*.json")}):
            all_runs = runs(results, setup, kind)
            points.append((median([it["records_per_sec"] for it in all_runs]),
                           median([ms(it["latency_us"], "p99") for it in all_runs])))
        points.sort()
        if points:
            axes.plot(*zip(*points), color=colour, marker=marker, label=label)
    axes.set(xscale="log", yscale="log", xlabel="records of 1 KiB per second",
             ylabel="p99 of an append, ms",
             title="Latency over load: 16 clients, batches of 100, open loop")
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    legend(axes)
    save(figure, directory, "peers-p99")


def percentiles(results, directory):
    figure, axes = plt.subplots()
    places = [("50", "p50"), ("90", "p90"), ("99", "p99"), ("99.9", "p999"), ("99.99", "p9999")]
    for setup in setups(results):
        colour, marker, label = STYLES[setup]
        all_runs = runs(results, setup, "open-0.5")
        if not all_runs:
            continue
        rate = median([it["records_per_sec"] for it in all_runs])
        times = [median([ms(it["latency_us"], name) for it in all_runs]) for _, name in places]
        axes.plot(range(len(places)), times, color=colour, marker=marker,
                  label=f"{label}: {rate / 1000:,.0f} K/s")
    axes.set(yscale="log", xlabel="percentile", ylabel="time of an append, ms",
             title="Percentiles at half of each one's highest rate")
    axes.set_xticks(range(len(places)), [label for label, _ in places])
    logarithmic(axes.yaxis)
    legend(axes, columns=1)
    save(figure, directory, "peers-percentiles")


def faults(results, directory):
    path = results / "faults.json"
    if not path.exists():
        return
    run, marks = load(path), load(results / "faults-marks.json")
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5))
    at = [it["at_seconds"] for it in run["intervals"]]
    above.step(at, [it["records_per_sec"] / 1000 for it in run["intervals"]], color="#0072B2",
               where="pre")
    below.plot(at, [it["latency_us"] and it["latency_us"]["p99"] / 1000 for it in run["intervals"]],
               color="#D55E00", marker="o", markersize=3)
    for axes in (above, below):
        for mark in marks:
            axes.axvline(mark["at_seconds"], color="#555555", linestyle=":")
    for number, mark in enumerate(marks):
        above.text(mark["at_seconds"], 1.02 + 0.09 * (number % 2), mark["what"], fontsize=9,
                   ha="center", transform=above.get_xaxis_transform())
    above.set(ylabel="thousand records/s", ylim=(0, None))
    below.set(yscale="log", ylabel="p99, ms", xlabel="seconds")
    logarithmic(below.yaxis)
    figure.suptitle("Three nodes through kill -9 of the leader and a rolling restart", y=1.04)
    save(figure, directory, "faults-time")


def sizes(results, directory):
    if not list(results.glob("*.size-*.json")):
        return
    figure, axes = plt.subplots()
    for setup in ("helix", "helix-three-nodes"):
        colour, marker, label = STYLES[setup]
        points = []
        for path in results.glob(f"{setup}.size-*.json"):
            run = load(path)
            points.append((run["load"]["size"], run["mb_per_sec"]))
        if points:
            axes.plot(*zip(*sorted(points)), color=colour, marker=marker, label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a record", ylabel="MB/s",
             title="Throughput over record size: 4 clients, batches of about 100 KiB")
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    legend(axes)
    save(figure, directory, "sizes")


def bars(results, directory):
    path = results / "facts.json"
    if not path.exists():
        return
    facts = load(path)
    groups = [
        ("failover, ms (p50 to p99)", facts["failover_ms"]),
        ("start after kill -9, ms", facts["start_ms"]),
        ("memory of an idle node, MiB", facts["idle_mib"]),
        ("bytes written per byte", facts["written_per_byte"]),
    ]
    figure, all_axes = plt.subplots(1, len(groups), figsize=(9, 2.8))
    for axes, (title, values) in zip(all_axes, groups):
        middle = statistics.median(values)
        axes.bar([0], [middle], color="#0072B2", width=0.5)
        axes.errorbar([0], [middle], yerr=[[middle - min(values)], [max(values) - middle]],
                      color="black", capsize=6)
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_xlim(-0.6, 0.6)
        axes.text(0.3, middle, plain(round(middle, 2 if middle < 10 else 0)), fontsize=9)
    figure.tight_layout()
    save(figure, directory, "facts")

    partitions = facts["partitions"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    counts = [it["partitions"] for it in partitions]
    left.plot(counts, [it["create_s"] for it in partitions], color="#0072B2", marker="o",
              label="create")
    left.plot(counts, [it["restart_s"] for it in partitions], color="#D55E00", marker="s",
              label="restart to first ack")
    right.plot(counts, [it["mib"] for it in partitions], color="#009E73", marker="^")
    left.set(xscale="log", yscale="log", ylabel="seconds", xlabel="partitions of one node")
    right.set(xscale="log", yscale="log", ylabel="MiB resident", xlabel="partitions of one node")
    for axes in (left, right):
        logarithmic(axes.xaxis)
        logarithmic(axes.yaxis)
    left.legend(frameon=False)
    figure.suptitle("Partitions are rows: time and memory for 10,000 to 1,000,000")
    figure.tight_layout()
    save(figure, directory, "partitions")


def tables(results):
    print("| records/s (p50, p99) | syncs before the ack | 1 client | 4 clients | 16 clients |")
    print("|---|---|---|---|---|")
    rates = {(setup, clients): median([it["records_per_sec"]
                                       for it in runs(results, setup, f"closed-{clients}")])
             for setup in setups(results) for clients in CLIENTS}
    synced = {"ceiling": "no", "helix": "yes", "helix-three-nodes": "yes, on a majority",
              "redis-always": "yes", "redis-everysec": "no", "jetstream": "no",
              "jetstream-always": "yes"}
    for setup in setups(results):
        cells = []
        for clients in CLIENTS:
            all_runs = runs(results, setup, f"closed-{clients}")
            rate, ceiling = rates[setup, clients], rates.get(("ceiling", clients))
            p50, p99 = (median([ms(it["latency_us"], name) for it in all_runs])
                        for name in ("p50", "p99"))
            ratio = f"; **{rate / ceiling:.2f}**" if ceiling and setup != "ceiling" else ""
            cells.append(f"{rate / 1000:,.0f} K ({p50:.2f}, {p99:.2f} ms{ratio})")
        print(f"| {STYLES[setup][2]} | {synced[setup]} | {' | '.join(cells)} |")
    print()
    print((results / "machine.txt").read_text())


def main():
    results, directory = Path(sys.argv[1]), Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    p99_over_throughput(results, directory)
    percentiles(results, directory)
    faults(results, directory)
    sizes(results, directory)
    bars(results, directory)
    tables(results)


if __name__ == "__main__":
    main()
