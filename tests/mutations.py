"""Files that are not what they should be: seeded mutations of whole ones, tried in forked processes.

A case is a number: it decides which file of a folder is changed, and how. A process that a case kills, by a signal or
an alarm, is told, and cases after it are not tried. While a reader works, the process may have little more memory than
before, and must not write, connect or start anything.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tarfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from drover.pipeline.core.errors import UserError
from tests.refusal import table

DEEP, DIGITS = "@deep@", "@digits@"
"""Stand for what json.dumps cannot write: lists in lists, and a number of more digits than Python reads."""
VALUES = (None, True, -1, 0, 2**31, 2**60, 2**64, 10**400, 0.5, 1e308, float("nan"), "", "\0", "1", "../../etc/passwd",
          "/", "\udc80\ud800", "\x1b]0;x\7", "x" * 70_000, "9999-99-99", [], {}, [[]], [None], [1, 2], [{}], {"": []},
          DEEP, DIGITS)
NUMBERS = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, -1, -8)
MEMORY, SECONDS = 2 << 30, 60
"""More than a case may take, by far."""
FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect",
             "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod",
             "shutil.rmtree", "shutil.copyfile")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Reader:
    """Something that reads files.

    make: writes whole ones into a folder, or names a kind of vocabulary. read: reads them; returns, or raises
    UserError. files: which of them are mutated. known: changes that once went wrong, each of one file, or what is in
    its place (OTHERWISE). cost: how many cases others have for each of its own. allowed: what it may do of what readers
    must not. any_size: it rightly reads a hole to its end, so it is given none.
    """

    name: str
    make: Callable[[Path], Any] | str
    read: Callable[[Path], Any]
    files: tuple[str, ...] = ("*",)
    known: Sequence[tuple[str, Callable[[bytes], bytes] | str]] = ()
    cost: int = 1
    allowed: tuple[str, ...] = ()
    any_size: bool = False


def mutate(path, chance, any_size=False):
    """Change a file; what was done, in a word."""
    draw = chance.random()
    content = path.read_bytes()
    if draw < 0.04:
        how = chance.choice([way for way in OTHERWISE if not (any_size and way == "hole")])
        path.unlink()
        OTHERWISE[how](path)
        return how
    change = STRUCTURED.get(path.suffix, _bytes) if draw < 0.7 else _bytes
    try:
        path.write_bytes(change(content, chance))
    except ValueError:  # it has not the structure of its kind
        path.write_bytes(_bytes(content, chance))
    return "content"


def put(*keys, value):
    """A change of JSON: another value at a place."""
    def change(whole):
        tree = node = json.loads(whole)
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        return _dumped(tree)
    return change


def planted(text):
    """Such changes, a line each: `file -> keys of the place -> value`."""
    return [(name, put(*(int(key) if key.isdigit() else key for key in keys.split()), value=value))
            for name, keys, value in table(text, str, str, json.loads)]


def _hole(path):
    """A file that is larger than any memory, and takes no room."""
    with open(path, "wb") as file:
        file.truncate(1 << 42)


OTHERWISE = {"missing": lambda path: None, "folder": os.mkdir, "dangling": lambda path: path.symlink_to("nowhere"),
             "loop": lambda path: path.symlink_to(path.name), "pipe": os.mkfifo, "hole": _hole,
             "endless": lambda path: path.symlink_to("/dev/zero"),
             "socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))}
"""What may be in a file's place."""


def _json(content, chance):
    tree = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        tree = _changed(tree, chance)
    return _dumped(tree)


def _yaml(content, chance):
    return _json(json.dumps(yaml.safe_load(content)), chance)


def _lines(content, chance):
    lines = content.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    lines[at] = _json(lines[at], chance) + b"\n" * chance.choice([1, 1, 1, 0, 2])
    if chance.random() < 0.2:
        chance.shuffle(lines)
    return b"".join(lines)


def _safetensors(content, chance):
    length = int.from_bytes(content[:8], "little")
    header = _json(content[8:8 + length], chance)
    return len(header).to_bytes(8, "little") + header + content[8 + length:]


def _dumped(tree):
    text = json.dumps(tree, ensure_ascii=False)
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{DIGITS}"', "9" * 5000)
    return text.encode("utf-8", "surrogatepass")


def _changed(tree, chance):
    """A tree with one change, at a place that a walk from its root comes to."""
    root = [tree]
    node, key = root, 0
    while isinstance(node[key], dict | list) and node[key] and chance.random() < 0.85:
        node = node[key]
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
    value, draw = node[key], chance.randrange(10)
    near = [[value], *([node[chance.choice(list(node))]] if isinstance(node, dict) else [])]
    if isinstance(value, int | float):
        near += [-value, value + 1, value - 1, value * 1000, str(value), bool(value), 1 << 60]
    if isinstance(value, str):
        near += [value[:-1], value * 2, ascii(value), f"../{value}", f"{value}\0", value[:1] * 70_000]
    if draw == 0:
        del node[key]
    elif draw == 1 and isinstance(node, dict):
        node[chance.choice(["new", "", "\0", "__class__", "0", key + " "])] = node.pop(key)
    elif draw == 1:
        node.extend([value] * chance.choice([1, 1000]))
    else:
        node[key] = chance.choice(near if draw < 5 else VALUES)
    return root[0] if root else None


def _bytes(content, chance):
    """With a piece that is cut out, doubled or another, with other bits, or other content."""
    at = chance.randrange(len(content) + 1)
    if chance.random() < 0.3:  # where headers are
        at = min(at, chance.randrange(64))
    head, tail = content[:at], content[at:]
    length = chance.choice([1, 2, 8, 64, 4096])
    size = chance.choice([1, 2, 4, 8])
    number = chance.choice(NUMBERS) & ((1 << 8 * size) - 1)
    written = head + number.to_bytes(size, chance.choice(["little", "big"])) + tail[size:]
    flipped = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 20]) if content else 0):
        flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    other = chance.choice([b"", b"\0" * 5000, b"\xff\xfe" + content, content * 2, b"[]", b"null", b"[" * 200_000,
                           content.decode("latin-1").encode("utf-16"), pickle.dumps(Path("x")), b"\x1f\x8b" + content])
    return chance.choice([head, head + tail[length:], head + chance.randbytes(length) + tail,
                          head + tail[:length] + tail, written, written, other, bytes(flipped), bytes(flipped)])


def _tar(content, chance):
    """With a header changed whose sum is right all the same."""
    starts = [at for at in range(0, len(content), 512) if content[at + 257:at + 262] == b"ustar"]
    if not starts:
        raise ValueError("there is no header")
    data, at = bytearray(content), chance.choice(starts)
    start, stop = chance.choice([(0, 100), (100, 108), (124, 136), (156, 157), (157, 257), (345, 500)])
    odd = chance.choice([b"77777777777", b"\x80" + b"\xff" * 11, b"-0000000001", b"x", b"L", b"2", b"g",
                         b"../../x.json", b"\0", chance.randbytes(12)])
    data[at + start:at + stop] = odd[:stop - start].ljust(stop - start, b"\0")
    data[at + 148:at + 156] = b"%06o\0 " % tarfile.calc_chksums(bytes(data[at:at + 512]))[0]
    return bytes(data)


STRUCTURED = {".json": _json, ".jsonl": _lines, ".yaml": _yaml, ".safetensors": _safetensors, ".tar": _tar}
"""What changes a file by its structure, by suffix."""


def tried(reader, folder, seed, cases):
    """What is wrong with how a reader takes these cases, up to one that ends its process."""
    kept = _contents(folder)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            try:
                _try(reader, folder, seed, cases, kept, pipe)
            except BaseException:  # noqa: BLE001 - the parent shows it
                pipe.write(traceback.format_exc())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as pipe:
        *parts, last = pipe.read().split("\0")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    started = [text for text in parts if text.isdigit()]
    assert started, f"{reader.name} does not read what is valid: {last}"
    failures = [text for text in parts if not text.isdigit()]
    if last != "end":
        _restore(folder, kept)
        failures.append(f"{reader.name} {started[-1]}: the process ended ({status}) {last[-500:]}")
    return failures


def _try(reader, folder, seed, cases, kept, pipe):
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    reader.read(folder)  # what it imports does not count
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seen, watching = [], False

    def hear(event, arguments):
        """Note what a reader must not do."""
        opens = event == "open" and isinstance(arguments[0], str | bytes) and arguments[0] != os.devnull
        if watching and event not in reader.allowed and (event in FORBIDDEN or (
                opens and isinstance(arguments[2], int) and arguments[2] & WRITING)):
            seen.append(f"{event}{arguments[:2]!r}"[:300])
    sys.addaudithook(hear)
    for number in cases:
        pipe.write(f"{number}\0")
        pipe.flush()
        how = _change(reader, folder, seed, number)
        signal.alarm(SECONDS)
        try:
            watching = True
            reader.read(folder)
        except UserError as error:
            if not str(error):
                seen.append("an error without words")
        except BaseException as error:  # noqa: BLE001 - all of that is what is looked for
            seen.append("".join(traceback.format_exception(error, limit=-6))[-2500:])
        finally:
            watching = False
            signal.alarm(0)
        if seen:
            pipe.write(f"{reader.name} {number} ({how}): " + "\n".join(seen).replace("\0", "\\0") + "\0")
            seen.clear()
        _restore(folder, kept)
    pipe.write("end")


def _contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _restore(folder, kept):
    for path in set(folder.rglob("*")) - kept.keys():
        if not path.is_dir():
            path.unlink()
    for path, data in kept.items():
        if path.is_symlink() or not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.write_bytes(data)


def _change(reader, folder, seed, number):
    """Make the case of this number of a reader's files, first those that are known, then mutations; what was done."""
    if number < len(reader.known):
        name, known = reader.known[number]
        path, = folder.glob(name)
        if isinstance(known, str):
            path.unlink()
            OTHERWISE[known](path)
        else:
            path.write_bytes(known(path.read_bytes()))
        return f"{name}, known: {known}"
    chance = Random(f"{reader.name} {seed} {number}")
    files = sorted(path for pattern in reader.files for path in folder.glob(pattern) if path.is_file())
    path = chance.choice(files)
    return f"{path.relative_to(folder)}: {mutate(path, chance, reader.any_size)}"
