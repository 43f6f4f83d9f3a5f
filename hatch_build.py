"""A wheel carries the compiled loops of ``wideflat/kernels`` for its platform, if it is built where a compiler is.

Without one, or where compiling fails, the wheel is one of plain Python: the loops are compiled at their first use, or
torch's operations are used. What a wheel carries must run on other processors than that of the builder, so it is
compiled for a common baseline; `wideflat.kernels.shipped` looks whether the processor has it. Those for float32 alone:
networks in float64 are rare, and have theirs compiled at first use.

The finished wheel is packed again: without the comments of the code, which are in the repository and the sdist (every
line keeps its number), and by zopfli where that is; 5 % smaller.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
KERNELS = ROOT / "wideflat" / "kernels"

#: For each kind of processor the flag that stands for ``-march=native``, and what torch must say of the processor.
BASELINES = {
    "x86_64": ("-march=x86-64-v3", ["AVX2", "AVX512"]),
    "aarch64": ("-march=armv8-a", []),
}
#: What makes a library smaller and no loop slower. -O2 is for these files alone: it would make committee machines train
#: 1.7 times slower.
SMALLER = ["-fno-unswitch-loops", "-fno-split-loops", "-fno-asynchronous-unwind-tables"]
WITH_O2 = ("entropy_sgd.c", "adamw.c")
#: For which types of numbers.
REALS = ("float",)
#: Seconds for one call of the compiler.
TIME_LIMIT = 120.0


class CustomBuildHook(BuildHookInterface):
    """Compile, and put the libraries into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is made; an editable installation compiles at first use, as always."""
        if version == "editable":
            return
        self.place = tempfile.mkdtemp()
        try:
            built = compile_libraries(Path(self.place))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"the wheel carries no compiled loops: {error}", file=sys.stderr)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
        build_data["force_include"].update({str(path): f"wideflat/kernels/compiled/{path.name}" for path in built})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled, and pack the wheel again."""
        shutil.rmtree(getattr(self, "place", ""), ignore_errors=True)
        if version == "editable":
            return
        try:
            pack_smaller(Path(artifact_path))
        except (AttributeError, TypeError, OSError, ValueError, zlib.error, zipfile.BadZipFile) as error:
            print(f"the wheel is packed as usual: {error}", file=sys.stderr)


class Compressor:
    """What zipfile asks of a compressor: zopfli's where it is, else zlib's."""

    def __init__(self) -> None:
        self.data = bytearray()

    def compress(self, data: bytes) -> bytes:
        """Wait for the rest."""
        self.data += data
        return b""

    def flush(self) -> bytes:
        """All of it, without the head and the sum that zlib has around it."""
        try:
            from zopfli.zlib import compress
        except ImportError:
            return zlib.compress(bytes(self.data), 9)[2:-4]
        return bytes(compress(bytes(self.data))[2:-4])


def pack_smaller(wheel: Path) -> None:
    """The same files in the same order in fewer bytes; the wheel stays as it is if anything would be different."""
    smaller = wheel.with_suffix(".smaller")
    try:
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
            files = {about.filename: old.read(about) for about in old.infolist()}
            files |= {name: without_comments(files[name]) for name in files if name.endswith(".py")}
            files |= {name: record(files, name) for name in files if name.endswith(".dist-info/RECORD")}
            for about in old.infolist():
                about.compress_type = zipfile.ZIP_DEFLATED
                with new.open(about, "w") as entry:
                    entry._compressor = Compressor()  # type: ignore[attr-defined]
                    entry.write(files[about.filename])
        with zipfile.ZipFile(smaller) as new:
            if {name: new.read(name) for name in new.namelist()} != files:
                raise ValueError("packed again it is another one")
        smaller.replace(wheel)
    finally:
        smaller.unlink(missing_ok=True)


def record(files: dict[str, bytes], name: str) -> bytes:
    """The list of the files of a wheel with their digests; it has none of itself."""
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},," if path == name else f"{path},sha256={digest},{len(content)}")
    return "\n".join([*lines, ""]).encode()


def without_comments(source: bytes) -> bytes:
    """Python code without its comments, each statement where it was.

    Raises:
        ValueError: The code would be another one.
    """
    text = source.decode()
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    bare = "\n".join(lines)
    before, after = (ast.dump(ast.parse(code), include_attributes=True) for code in (text, bare))
    if before != after:
        raise ValueError("without comments the code is another one")
    return bare.encode()


def compile_libraries(place: Path) -> list[Path]:
    """The libraries that a wheel carries, and what is said about each beside it.

    Raises:
        ValueError: There is no compiler, or no baseline for this kind of processor.
        subprocess.SubprocessError: It fails, or hangs.
    """
    machine = platform.machine()
    if os.name != "posix" or sys.platform != "linux" or machine not in BASELINES:
        raise ValueError(f"no baseline is known for {sys.platform} on {machine}")
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise ValueError(f"there is no C compiler ({compiler[0]})")
    march, capabilities = BASELINES[machine]
    sources = {name: (KERNELS / name).read_bytes() for name in constant("SOURCES")}
    for name, source in sources.items():
        (place / name).write_bytes(source)
    files = []
    for real in REALS:
        flags = [march if flag == "-march=native" else flag for flag in constant("FLAGS")]
        flags += [*SMALLER, "-fopenmp", f"-DREAL={real}"] + ["-DDOUBLE"] * (real == "double")
        names = [name for name in sources if name.endswith(".c")]
        library = place / f"kernels-{real}.so"
        run([*compiler, *flags, "-c", *(name for name in names if name not in WITH_O2)], place)
        run([*compiler, *flags, "-O2", "-ftree-vectorize", "-c", *WITH_O2], place)
        objects = [f"{Path(name).stem}.o" for name in names]
        run([*compiler, "-shared", "-s", "-Wl,-z,noseparate-code", *objects, "-lm", "-o", library.name], place)
        about = {
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "sources": hashlib.sha256(bytes(1).join(sources.values())).hexdigest(),
            "machine": machine,
            "capabilities": capabilities,
        }
        library.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
        files += [library, library.with_suffix(".json")]
    return files


def constant(name: str) -> list[str]:
    """A list of words that ``library.py`` has under a name; that file imports torch, which building does not need."""
    for node in ast.parse((KERNELS / "library.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return list(ast.literal_eval(node.value))
    raise ValueError(f"library.py has no {name}")


def run(command: list[str], place: Path) -> None:
    """Run the compiler."""
    subprocess.run(command, cwd=place, check=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL)
