"""The simulation of many nodes finds chunks that move, and runs with few ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_nodes.py"


def test_small(tmp_path: Path) -> None:
    sizes = ("--samples", "1000000", "--ranks", "16", "--ranks-a-node", "4", "--sample-bytes", "50000", "--epochs", "1")
    command = [sys.executable, str(SCRIPT), *sizes, "--json", str(tmp_path / "found.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert "requests_per_s" in run.stdout
    scale = found["scale"]
    assert scale["batches"] == -(-1_000_000 // (16 * 256)) and scale["bytes_per_s"] >= 16 * 2500 * 50_000
    mixed = found["effective_batch_of_256"]
    assert all(0.8 * mixed["1 nodes"] < each < 1.2 * mixed["1 nodes"] for each in mixed.values())
