"""`metrale inspect`: what a checkpoint holds, the memory it will need, and what is not supported and why."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrale import env, hub
from metrale.errors import MetraleError

if TYPE_CHECKING:
    from metrale.config.spec import ModelSpec
    from metrale.formats import Checkpoint

HELP = "show a checkpoint's config, tensors, formats and memory, and what is not supported (`inspect env`: the variables)"
EXAMPLES = """  metrale inspect smollm2-135m
  metrale inspect ./Llama-3.2-1B --tensors --context 4096
  metrale inspect env"""

SCAN_BYTES = 2 << 30  # of weights that are read by default: a second or two


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("path", help="a checkpoint's file or folder, a pulled name, or the word env")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--context", type=_length, metavar="N", help="tokens of a sequence for the memory estimate (default: the model's)"
    )
    scan = parser.add_mutually_exclusive_group()
    scan.add_argument(
        "--nan",
        action="store_true",
        default=None,
        help="read every weight and warn of NaN and infinity (default: when the weights are below 2 GiB)",
    )
    scan.add_argument("--no-nan", action="store_false", dest="nan", help="do not read the weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _length(text: str) -> int:
    """Return a number of tokens. Raises: ValueError, which argparse turns into wrong usage."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when the checkpoint cannot be run."""
    if args.path == "env":
        for name, variable in env.VARIABLES.items():
            print(f"{name:16} {env.get(name) or '(unset)':10} {variable.help}")
        return 0
    report = inspect(hub.resolve(args.path), context=args.context, scan_nan=args.nan)
    print(json.dumps(report, indent=2) if args.json else as_text(report, list_tensors=args.tensors))
    return 1 if report["problems"] else 0


def inspect(path: Path, *, context: int | None = None, scan_nan: bool | None = False) -> dict[str, Any]:
    """Return what is known of a checkpoint as plain data; problems are listed, not raised.

    scan_nan: read every weight and warn of NaN and infinity; None: when the weights are below `SCAN_BYTES`.
    Raises: WeightError for a container that cannot be read at all.
    """
    from metrale.formats import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        tensors = checkpoint.tensors.values()
        report: dict[str, Any] = {
            "path": str(path),
            "container": checkpoint.container,
            "tensors": [{"name": t.name, "format": t.format, "shape": list(t.shape), "bytes": t.nbytes} for t in tensors],
            "formats": dict(Counter(t.format for t in tensors)),
            "weight_bytes": sum(t.nbytes for t in tensors),
            "problems": [],
            "warnings": [],
        }
        if checkpoint.container == "safetensors":
            _second_opinion(checkpoint, report)
        try:
            _understand(checkpoint, path, report, context)
        except MetraleError as error:
            report["problems"].append(f"{error} [{error.code}]")
        if report["weight_bytes"] < SCAN_BYTES if scan_nan is None else scan_nan:
            _scan(checkpoint, report)
    return report


def _second_opinion(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Warn where the format's own library refuses a file that our reader took.

    Our reader is its own because the library's NumPy front end copies what it reads and has no bf16.
    """
    from safetensors import SafetensorError, safe_open

    for file in checkpoint.files:
        try:
            with safe_open(str(file.path), framework="np") as other:
                other.keys()
        except SafetensorError as error:
            message = f"{file.path}: expected a file the safetensors library accepts, got: {error}; fetch it again"
            report["warnings"].append(message)


def _understand(checkpoint: Checkpoint, path: Path, report: dict[str, Any], context: int | None) -> None:
    from metrale import families
    from metrale.model.load import read_config
    from metrale.weights.index import TensorIndex
    from metrale.weights.preflight import preflight

    config = read_config(checkpoint, path)
    report["config"] = _plain(config.mapping)
    resolved = families.resolve(config.mapping, config.source)
    spec = resolved.spec
    report["family"] = spec.family
    report["parameters"] = spec.num_params
    report["unread_keys"] = list(resolved.unread)
    report["end_tokens"] = list(config.generation.eos_ids)
    report["memory"] = memory(spec, report["weight_bytes"], context or spec.max_context)
    found = preflight(TensorIndex(checkpoint), resolved.weights, config.source)
    report["problems"] += [f"{problem} [{problem.code}]" for problem in found.problems]


def memory(spec: ModelSpec, weight_bytes: int, context: int) -> dict[str, int]:
    """Return the bytes that weights and one sequence of `context` tokens take on the CPU (K/V in float32)."""
    per_token = sum(4 * (group.k_dim + group.v_dim) * group.heads * len(group.layers) for group in spec.kv_groups)
    return {
        "weights": weight_bytes,
        "context_tokens": context,
        "kv_bytes_per_token": per_token,
        "kv_bytes": per_token * context,
        "total": weight_bytes + per_token * context,
    }


def _scan(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    from metrale.weights.loader import count_not_finite

    for tensor in checkpoint.tensors.values():
        bad = count_not_finite(tensor)
        if bad:
            report["warnings"].append(
                f"{tensor.name}: {bad} of {tensor.size} values are NaN or infinite; the checkpoint is damaged"
            )
        tensor.release()


def _plain(value: Any) -> Any:
    """Return JSON-able data; long lists are shortened."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value] if len(value) <= 64 else f"[{len(value)} values]"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def as_text(report: dict[str, Any], *, list_tensors: bool) -> str:
    """Return the report for people."""
    mib = 1 << 20
    out = [
        f"{report['path']}: {report['container']}, {len(report['tensors'])} tensors, {report['weight_bytes'] / mib:,.1f} MiB",
        "formats: " + ", ".join(f"{name} x{count}" for name, count in sorted(report["formats"].items())),
    ]
    if "family" in report:
        need = report["memory"]
        out.append(f"family: {report['family']}, {report['parameters'] / 1e6:,.1f} M parameters in matrices")
        out.append(
            f"memory: weights {need['weights'] / mib:,.1f} MiB + K/V {need['kv_bytes'] / mib:,.1f} MiB for "
            f"{need['context_tokens']} tokens ({need['kv_bytes_per_token'] / 1024:,.1f} KiB each) = "
            f"{need['total'] / mib:,.1f} MiB"
        )
        out.append("end tokens: " + (", ".join(map(str, report["end_tokens"])) or "none"))
    if "config" in report:
        out.append("config:")
        out += [f"  {key}: {value}" for key, value in report["config"].items()]
    if report.get("unread_keys"):
        out.append("config keys that nothing read: " + ", ".join(report["unread_keys"]))
    if list_tensors:
        out += [
            f"  {t['name']:48} {t['format']:6} {'x'.join(map(str, t['shape'])):>16} {t['bytes']:>14,} B"
            for t in report["tensors"]
        ]
    out += [f"warning: {text}" for text in report["warnings"]]
    out += [f"not supported: {text}" for text in report["problems"]] or ["supported: yes"]
    return "\n".join(out)
