"""plan: where the memory of every rank goes and what fits, from a checkpoint directory, without loading anything."""

import json
import os.path
import sys

from revolta_serve.commands.host_memory import check_memory
from revolta_serve.commands.plan_account import Plan, account, files
from revolta_serve.commands.plan_predecessor import compare
from revolta_serve.commands.plan_text import as_json, comparison_lines, lines
from revolta_serve.commands.plan_weights import STATED
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig


def plan(config: ServeConfig, *, weights: str, layout: str, as_object: bool) -> int:
    """Print the plan of a configuration; returns the exit code.

    weights: format of weights that are not there, or "checkpoint". layout: predecessor adds the comparison with its rules. as_object:
    print one JSON object. Raises ConfigError or CheckpointError for what cannot be, as the server would.
    """
    for name, value, legal in (("--weights", weights, ("checkpoint", *STATED)), ("--layout", layout, ("ours", "predecessor"))):
        if value not in legal:
            raise ConfigError(f"{name} {value!r} is none of {', '.join(legal)}")
    if not os.path.isdir(config.model.path):
        raise ConfigError(f"model directory {config.model.path!r} does not exist; give the directory that holds config.json")
    model = ModelConfig.load(config.model.path)
    planned = account(config, model, stated=weights, index=files(config.model.path) if weights == "checkpoint" else None)
    rows = compare(planned, model) if layout == "predecessor" else []
    refusal = "" if planned.planned else _refusal(planned, model)
    if as_object:
        compared = {"comparison": [row.as_json() for row in rows]} if rows else {}
        print(json.dumps(as_json(planned) | {"refused_here": refusal or None} | compared, indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        from revolta_serve.commands.plan_tables import comparison_table, tables

        console = Console()
        for table in tables(planned):
            console.print(table)
        console.print("\n".join(lines(planned)), markup=False, highlight=False)
        if rows:
            console.print(comparison_table(rows))
    else:
        print("\n".join([*lines(planned), *comparison_lines(rows)]))
    if refusal:
        print(f"revolta-serve: warning: this machine cannot serve it: {refusal}", file=sys.stderr)
    return 0


def _refusal(planned: Plan, model: ModelConfig) -> str:
    """Why a server would not start here, where no device is planned with; empty if it would."""
    try:
        check_memory(planned.config, model, planned.capacity)
    except ConfigError as error:
        return error.message
    return ""
