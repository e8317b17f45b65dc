"""Nothing a provider runs can load pickle, TorchScript, an exported archive or Python from elsewhere."""

import ast
import builtins
import importlib.util
import io
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ravnest
from ravnest.errors import RavnestError, UnsafeBlueprint
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.stage.dry_run import dry_run
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.state.state_dict import read_snapshot, to_safetensors
from tests.support.sample_blueprints import perceptron

PROVIDER = [
    "ravnest.model.blueprint.blueprint_json",
    "ravnest.model.stage.dry_run",
    "ravnest.model.stage.stage_program",
    "ravnest.model.state.state_dict",
]
FORBIDDEN_IMPORTS = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "runpy",
    "code",
    "importlib",
}
# What torch's compiler wrote on this very PC, for this provider, in a folder of this user alone: decision 24.
OWN_CODE = {"ravnest.peer.compile_process": {"importlib.abc", "importlib.util"}}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    f"torch.{name}"
    for name in ("load", "save", "jit", "export", "package", "hub", "serialization", "classes")
} | {"numpy.load", "np.load"}


def provider_modules() -> set[str]:
    """Return every module of ours that a provider's code can import."""
    roots = [
        *PROVIDER,
        *(m.name for m in pkgutil.walk_packages(ravnest.__path__, "ravnest.") if ".peer" in m.name),
    ]
    reached: set[str] = set()
    while roots:
        name = roots.pop()
        if name not in reached:
            reached.add(name)
            roots += [
                found for found in imports(tree(name)) if found.startswith("ravnest") and is_module(found)
            ]
    return reached


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a name inside a module
        return False


def tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module != "ravnest":  # its names are loaded one by one
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(module: ast.Module) -> set[str]:
    found = {name for name in imports(module) if name.split(".")[0] in FORBIDDEN_IMPORTS}
    used = list(imports(module))
    used += [ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    found |= {name for name in used if any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN_ATTRIBUTES)}
    return found | {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and n.id in FORBIDDEN_NAMES}


def test_a_provider_reaches_no_loader_of_foreign_code() -> None:
    modules = provider_modules()
    assert {"ravnest.model.blueprint.operators", "ravnest.model.blueprint.blueprint_json"} < modules
    assert not {"ravnest.model.capture.capture", "ravnest.model.capture.trace"} & modules, (
        "capture runs the requester's code"
    )
    assert {name: faults(tree(name)) for name in modules if faults(tree(name))} == OWN_CODE


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.jit.load('x')",
        "import torch\nx = torch.export.load",
        "from torch.export import load",
        "eval('1')",
        "import numpy as np\nnp.load('x')",
    ],
)
def test_the_check_sees_a_loader(code: str) -> None:
    assert faults(ast.parse(code))


def test_a_stage_runs_with_every_loader_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    blueprint = perceptron()
    weights = to_safetensors(
        {
            entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            for entry in blueprint.state
        },
        blueprint,
    )
    data = write_blueprint(blueprint)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a loader of foreign code was called")

    monkeypatch.setattr(pickle, "Unpickler", type("Refusing", (pickle.Unpickler,), {"__init__": refuse}))
    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
        (torch.jit, "load"),
        (torch.export, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    stage = read_blueprint(data)
    dry_run(stage, 3, max_bytes=1e8, max_flops=1e9)
    state, _ = read_snapshot(weights, stage.state)
    fields = {
        name: torch.zeros(
            stage.train.values[value].shape_at(3), dtype=getattr(torch, stage.train.values[value].dtype)
        )
        for value, name in stage.train.fields
    }
    passed = build_stage_program(stage).forward(
        {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in state.items()},
        {},
        fields,
    )
    passed.results["loss"].backward()


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return builtins.exec, ("import builtins; builtins.exploded = True",)


def archives() -> dict[str, bytes]:
    """Return what an attacker would send: each runs code in its own loader."""
    saved = io.BytesIO()
    torch.save({"weight": Bomb()}, saved)
    return {"pickle": pickle.dumps(Bomb()), "torch.save": saved.getvalue(), "zip": b"PK\x03\x04" + bytes(64)}


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "zip"])
def test_archives_are_refused_and_not_run(kind: str) -> None:
    data = archives()[kind]
    with pytest.raises(UnsafeBlueprint):
        read_blueprint(data)
    with pytest.raises(RavnestError):
        read_snapshot(data, perceptron().state)
    assert not hasattr(builtins, "exploded")
