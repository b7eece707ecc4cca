"""The one table of a run on a GPU: what came out against what it is compared with."""

from __future__ import annotations

from typing import Any

from oasis_sglang.serving import Report

Row = dict[str, Any]


def passed(results: dict[str, Any]) -> bool:
    """Whether every check of a kernel ran and passed, and no item of any stage failed."""
    stages = [results.get(name, {}) for name in ("checks", "bandwidth", "decode")]
    checks = results.get("checks", {})
    verdicts = [x["passed"] for x in checks.get("results", {}).values()]
    return bool(verdicts) and all(verdicts) and not checks["skipped"] and not any(x.get("failed") for x in stages)


def ratios(results: dict[str, Any]) -> list[Row]:
    """Rows of `what`, `measured` and `against` with their `unit`, and `ratio`, of the stages that have run."""
    return [*_checks(results), *_bandwidths(results), *_decodes(results)]


def _of(results: dict[str, Any], stage: str) -> dict[str, Any]:
    return results.get(stage, {}).get("results", {})


def _row(what: str, measured: float, against: float, unit: str) -> Row:
    ratio = measured / against if against else None
    return {"what": what, "measured": measured, "against": against, "unit": unit, "ratio": ratio}


def _checks(results: dict[str, Any]) -> list[Row]:
    found = _of(results, "checks")
    if "checks" not in results:
        return []
    outcome = results["checks"]
    total = len(found) + len(outcome["failed"]) + len(outcome["skipped"])
    return [_row("kernel checks passed / all", sum(x["passed"] for x in found.values()), total, "checks")]


def _bandwidths(results: dict[str, Any]) -> list[Row]:
    """Each kernel's bytes per second against the copy that bounds it; a product beside fetching against it alone; and a
    step's attention by FlashInfer against Triton's, where a server would try both."""
    rows = []
    taken = _of(results, "bandwidth").get("attention chosen", {}).get("chosen")
    for name, x in _of(results, "bandwidth").items():
        if "of_copy" in x:
            against = x["bytes_per_second"] / x["of_copy"]
            mark = ", chosen" if name.startswith(f"attend {taken} ") else ""
            rows.append(_row(f"{name}{mark} / copy", x["bytes_per_second"] / 1e9, against / 1e9, "GB/s"))
        elif "flashinfer_seconds" in x:
            what = f"a layer's attention, {taken} chosen: flashinfer / triton"
            rows.append(_row(what, x["flashinfer_seconds"] * 1e6, x["triton_seconds"] * 1e6, "µs"))
        elif "slower" in x:
            rows.append(_row(f"{name} / alone", x["beside_seconds"] * 1e3, x["alone_seconds"] * 1e3, "ms"))
    return rows


def _decodes(results: dict[str, Any]) -> list[Row]:
    """Tokens per second of sparse against dense decoding at the same context and batch."""
    found = {name: x for name, x in _of(results, "decode").items() if "tokens_per_second" in x}
    rows = []
    for x in found.values():
        dense = next((y for y in found.values() if y["kind"] == "dense" and _place(y) == _place(x)), None)
        if x["kind"] == "dense" or dense is None:
            continue
        way, other = (f"{y['label']} by {y['attention']}" for y in (x, dense))
        what = f"decode {x['context']:,} × {x['sequences']}: {way} / {other}"
        rows.append(_row(what, x["tokens_per_second"], dense["tokens_per_second"], "tokens/s"))
    return rows


def _place(x: dict[str, Any]) -> tuple[int, int]:
    return x["context"], x["sequences"]


def show(report: Report) -> None:
    taken = _of(report.results, "bandwidth").get("attention chosen")
    lines = [f"The worked shape's steps attend by {taken['reason']}."] if taken is not None else []
    stages = [x for x in report.results.values() if isinstance(x, dict)]
    notes = dict.fromkeys(why for stage in stages for why in stage.get("not_measured", {}).values())
    lines.extend(f"{note}." for note in notes)
    if not report.results["times_mean_something"]:
        lines.append("On a CPU, interpreted: times and their ratios mean nothing.")
    caption = " ".join(lines)
    rows = [(x["what"], x["measured"], x["against"], x["unit"], x["ratio"]) for x in report.results["ratios"]]
    title = report.results["device"].get("name", "no GPU") if not report.results["tiny"] else "CPU, tiny shapes"
    report.table(f"GPU kernels: {title}", ("what / against", "measured", "against", "unit", "ratio"), rows, caption)
