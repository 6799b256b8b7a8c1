"""revolta-serve: the command line. The only file that reads the environment, and only REVOLTA_API_KEY."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from revolta_serve import profile
from revolta_serve.config import Entry, options
from revolta_serve.errors import CheckpointError, ConfigError, RequestError, RevoltaError
from revolta_serve.profile import Loaded

app = typer.Typer(add_completion=False, invoke_without_command=True, pretty_exceptions_enable=False, rich_markup_mode=None)

# The parser's exception for arguments it cannot make sense of; typer exports only this subclass of it.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="directory of the checkpoint")]
Profile = Annotated[str, typer.Option("--profile", metavar="NAME", help="a shipped profile or a .toml file")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="set any field, repeatable")]


@app.callback()
def root(context: typer.Context) -> None:
    """Serve Qwen3.8 Flash-Next over HTTP, or try it without a server."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field that has a flag; the command receives those given as `flags`, by section.key."""
    entries = {entry.flag[2:].replace("-", "_"): entry for entry in options() if entry.flag}
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]

    def run(**values: Any) -> None:
        given = {entry.path: values.pop(name) for name, entry in entries.items()}
        command(**values, flags={path: value for path, value in given.items() if value not in (None, [])})

    parameters = own + [_parameter(name, entry) for name, entry in entries.items()]
    run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(name: str, entry: Entry) -> inspect.Parameter:
    kind, metavar, default, declared = entry.kind, None, str(entry.default), [entry.flag]
    if get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(entry.kind))
    elif get_origin(kind) is tuple:
        kind, metavar, default = list[str], "TEXT", ""
    elif kind is bool:
        declared = [f"{entry.flag}/--no-{entry.flag[2:]}"]
        default = "on" if entry.default else "off"
    help = f"{entry.help} [{default}]" if default else entry.help
    option = typer.Option(*declared, metavar=metavar, help=help, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _load(profile_name: str, model: str, flags: dict[str, Any], sets: list[str] | None) -> Loaded:
    key = os.environ.get("REVOLTA_API_KEY")
    return profile.load(profile_name, {"model.path": model, **flags}, sets or (), key=key, variable="REVOLTA_API_KEY")


@app.command()
@with_flags
def serve(model: Model, profile: Profile = "cpu", set: Sets = None, flags: dict[str, Any] | None = None) -> None:
    """Serve a checkpoint over HTTP."""
    loaded = _load(profile, model, flags or {}, set)
    from revolta_serve.commands.serve import serve as run

    raise typer.Exit(run(loaded))


@app.command()
@with_flags
def plan(
    model: Model,
    layout: Annotated[str, typer.Option(metavar="ours|predecessor", help="predecessor: compare with its rules too [ours]")] = "ours",
    weights: Annotated[
        str, typer.Option(metavar="checkpoint|dense|awq-g32|nvfp4|fp4-local", help="format of weights that are not there [checkpoint]")
    ] = "checkpoint",
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    profile: Profile = "cpu",
    set: Sets = None,
    flags: dict[str, Any] | None = None,
) -> None:
    """Print where the memory of every rank goes and what fits, without loading anything."""
    loaded = _load(profile, model, flags or {}, set)
    from revolta_serve.commands.plan import plan as run

    raise typer.Exit(run(loaded.config, weights=weights, layout=layout, as_object=json))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="text to continue, special tokens included")] = "",
    token_ids: Annotated[str, typer.Option(metavar="1,2,3", help="token ids to continue; the answer is printed as ids")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the sampling noise")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after a token that ends an answer")] = False,
    logits: Annotated[Path | None, typer.Option(metavar="FILE", help="write the logits of every token as .safetensors")] = None,
    profile: Profile = "cpu",
    set: Sets = None,
) -> None:
    """Continue one prompt with the engine in this process, without a server."""
    loaded = _load(profile, model, {}, set)
    from revolta_serve.commands.generate import Job
    from revolta_serve.commands.generate import generate as run

    job = Job(prompt, token_ids, max_tokens, temperature, seed, ignore_eos, logits)
    raise typer.Exit(run(loaded.config, job))


@app.command(name="make-tiny")
def make_tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory to write; created if needed")],
    seed: Annotated[int, typer.Option(help="of the random weights")] = 0,
    dtype: Annotated[str, typer.Option(metavar="float32|float16|bfloat16", help="type of the weights")] = "float32",
    shards: Annotated[int, typer.Option(min=1, help="weight files")] = 1,
    kv_scales: Annotated[bool, typer.Option(help="write calibrated K and V scales")] = True,
    text_only: Annotated[bool, typer.Option("--text-only", help="no vision tower, names of a text export")] = False,
    per_expert: Annotated[bool, typer.Option("--per-expert", help="one tensor per expert instead of banks")] = False,
    force: Annotated[bool, typer.Option("--force", help="delete a checkpoint in DIR that make-tiny did not write")] = False,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="a dimension, such as layers=4, repeatable")] = None,
) -> None:
    """Write a tiny checkpoint of the real architecture with random weights."""
    from revolta_serve.weights.tiny import make_tiny
    from revolta_serve.weights.tiny_shape import TinyShape

    config = make_tiny(
        directory,
        seed=seed,
        dtype=dtype,
        shards=shards,
        kv_scales=kv_scales,
        text_only=text_only,
        per_expert=per_expert,
        force=force,
        **TinyShape.read(set or []),
    )
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {config.layers} layers, hidden {config.hidden}, vocabulary {config.vocab}, {size / 1e6:.1f} MB")


@app.command()
def demo(
    stay: Annotated[bool, typer.Option("--stay", help="go on serving until interrupted")] = False,
    question: Annotated[str, typer.Option(help="what to ask")] = "What does a V100 do all day?",
    max_tokens: Annotated[int, typer.Option(min=1, help="length of the answer")] = 64,
) -> None:
    """Make a tiny checkpoint, serve it, and ask one question over HTTP."""
    from revolta_serve.commands.demo import demo as run

    raise typer.Exit(run(profile.load("cpu"), question=question, max_tokens=max_tokens, stay=stay))


@app.command()
def doctor() -> None:
    """Look at this machine and say what is missing and how to mend it."""
    from revolta_serve.commands.doctor import doctor as run

    raise typer.Exit(run())


def main() -> None:
    """Entry point. A mistake of the user's is one line on standard error and exit 2; any other error of ours is one line and exit 1."""
    try:
        _check_once(sys.argv[1:])
        code = app(standalone_mode=False)
    except _USAGE as error:
        code = _complain(f"{error.format_message()} (see {_program(error)} --help)", 2)  # type: ignore[attr-defined]
    except RevoltaError as error:
        code = _complain(error.message, 2 if isinstance(error, ConfigError | CheckpointError | RequestError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


def _check_once(words: Sequence[str]) -> None:
    """Raise ConfigError for an option that has one value and comes twice: the parser would take the last without a word."""
    command = getattr(typer.main.get_command(app), "commands", {}).get(words[0] if words else "")
    single = [option for option in command.params if not getattr(option, "multiple", True)] if command else []
    names = {name: option.opts[0] for option in single for name in (*option.opts, *option.secondary_opts)}
    given = [names[flag] for word in words if (flag := word.partition("=")[0]) in names]
    twice = next((flag for place, flag in enumerate(given) if flag in given[:place]), "")
    if twice:
        raise ConfigError(f"{twice} is given twice; give it once")


def _program(error: Exception) -> str:
    """The words before the arguments: `revolta-serve` and the command, as far as it was recognised."""
    context = getattr(error, "ctx", None)
    command = context.info_name if context is not None and context.parent is not None else ""
    return f"revolta-serve {command}".strip()


def _complain(message: str, code: int) -> int:
    print(f"revolta-serve: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
