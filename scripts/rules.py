"""Rules that no other tool knows: no patches of the package, no name twice, no timeout outside config.py.

Tests, benchmarks and studies use private names of others ever less: how often is a number that only falls.

    python scripts/rules.py [ROOT]

Each violation is a line with its file; the program ends with 1 if there is any.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "ravnest"
CHECKED = ("tests", "benchmarks", "studies")  # where nothing of the package may be patched
FUNCTIONS = {"setattr", "delattr", "patch"}
METHODS = FUNCTIONS | {"object", "multiple", "dict", "setitem", "delitem"}  # of monkeypatch and mock.patch
MOST_PRIVATE = 75  # uses of private names of others in this repository; it falls with every one that goes
# Private names of Python and of torch, for which there are no public ones.
OUTSIDE = {"_exit", "_version", "_cdata", "_schema", "_buffers", "_foreach_add_", "_to_copy"}
REPEATED = {"logger"}  # each module has its own, by convention
SECONDS = re.compile(r"[A-Z0-9_]*_(MILLI)?SECONDS[A-Z0-9_]*|[A-Z0-9_]*MILLISECONDS[A-Z0-9_]*")
# Numbers of an algorithm or of nature; what somebody might wait for is in config.Timeouts.
NUMERICS = {
    "net/congestion.py": {
        "QUEUE_SECONDS",
        "LONGEST_QUEUE_SECONDS",
        "BURST_SECONDS",
        "UPLOAD_BURST_SECONDS",
        "WHILE_SECONDS",
        "_SHORTEST_SECONDS",
    },
    "hub/coordinator/planner.py": {"_LEAST_SECONDS"},  # of a microbatch that is worth its overhead
    "hub/monitors/liveness.py": {"_LEAST_SECONDS", "_MOST_SECONDS"},  # of work that is believed
    "hub/service/status.py": {"_RATE_SECONDS"},  # that a rate is a mean over
    "plan/types.py": {"DAY_SECONDS"},
    "averaging/ring.py": {"_CHUNK_SECONDS"},  # of a link's time, for one chunk
    "transfer/link_probe.py": {"_ENOUGH_SECONDS", "_LEAST_SECONDS"},  # of a transfer that can be timed
    "peer/stage_builder.py": {"_SPLIT_SECONDS", "_PROBE_SECONDS"},  # of work, not of waiting
    "peer/capabilities.py": {"_MOST_SECONDS", "_MOST_TRIAL_SECONDS"},  # of work, not of waiting
    "cli/join.py": {"_LONGEST_BATCH_SECONDS", "_USUAL_LATENCY_SECONDS"},  # of work, and of a usual link
    "requester/run_folder.py": {"_SAME_PROCESS_SECONDS"},  # to which systems round a process's start
}


def find_patches(root: Path) -> Iterator[str]:
    """Yield where tests, benchmarks or studies assign to something of the package."""
    for folder in CHECKED:
        for file in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            nodes = list(ast.walk(tree))
            names, instances = _of_package(nodes)
            for node in nodes:
                for target in _targets(node, names, instances):
                    yield f"{file.relative_to(root)}:{node.lineno}: patches {ast.unparse(target)}"


def _of_package(nodes: list[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that are modules, classes or functions of the package, and those of their results."""
    names: set[str] = set(_imported(nodes))
    instances: set[str] = set()
    for target, value in _bound(nodes):
        if _loads_ours(value):
            names.add(target)
        elif _root(value.func) in names:
            instances.add(target)
    return names, instances


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.asname or PACKAGE for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            yield from (alias.asname or alias.name for alias in node.names)


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the names that are given what a call returns."""
    for node in nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, node.context_expr)]
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                yield target.id, value


def _targets(node: ast.AST, names: set[str], instances: set[str]) -> Iterator[ast.expr]:
    """Yield what a node would change that is of the package."""
    if isinstance(node, ast.Call) and node.args and _is_patcher(node.func):
        first = node.args[0]
        is_text = isinstance(first, ast.Constant) and isinstance(first.value, str) and _is_ours(first.value)
        if is_text or _root(first) in names | instances:
            yield first
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]:
            if isinstance(target, ast.Attribute) and _root(target) in names:
                yield target


def _is_patcher(function: ast.expr) -> bool:
    return _called(function) in (METHODS if isinstance(function, ast.Attribute) else FUNCTIONS)


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _root(value: ast.expr) -> str | None:
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


def _loads_ours(call: ast.Call) -> bool:
    first = call.args[0] if call.args else None
    is_ours = isinstance(first, ast.Constant) and isinstance(first.value, str) and _is_ours(first.value)
    return is_ours and _called(call.func) == "import_module"


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def find_repeated(root: Path) -> Iterator[str]:
    """Yield the public names that more than one module of the package defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted((root / PACKAGE).rglob("*.py")):
        for name in sorted(set(_defined(ast.parse(file.read_text(encoding="utf-8")).body))):
            if not name.startswith("_") and name not in REPEATED:
                places[name].append(str(file.relative_to(root)))
    for name, files in sorted(places.items()):
        if len(files) > 1:
            yield f"{name} is defined in {' and '.join(files)}"


def find_timeouts(root: Path) -> Iterator[str]:
    """Yield the constants in seconds that are neither in config.py nor the numbers of an algorithm."""
    package = root / PACKAGE
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for name in (name for body in bodies for name in _defined(body)):
            if place != "config.py" and SECONDS.fullmatch(name) and name not in NUMERICS.get(place, ()):
                yield f"{file.relative_to(root)}: {name} is for config.Timeouts"


def find_private(root: Path, most: int) -> Iterator[str]:
    """Yield the uses of others' private names by what is checked, if they are not as many as said."""
    files = [file for folder in CHECKED for file in sorted((root / folder).rglob("*.py"))]
    used = [f"{file.relative_to(root)}:{line}: {name}" for file in files for line, name in _reached(file)]
    if len(used) > most:
        yield from used
        yield f"{len(used)} uses of private names, {most} are allowed: use what is public"
    elif len(used) < most:
        yield f"{len(used)} uses of private names are left: lower MOST_PRIVATE in scripts/rules.py to it"


def _reached(file: Path) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in OUTSIDE:
            if _root(node) not in ("self", "cls") and not _is_super(node.value):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))


def _is_super(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _called(value.func) == "super"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined(node.body)


def main() -> int:
    here = Path(__file__).resolve().parents[1]
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else here
    private = find_private(root, MOST_PRIVATE if root == here else 0)
    found = [*find_patches(root), *find_repeated(root), *find_timeouts(root), *private]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
