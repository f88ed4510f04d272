"""What `working_dir` becomes: the files that Ray packs, and a digest of the code among them.

The selection is Ray's own, so what is shown here is what is uploaded: `.git`, `.venv`, `venv` and `__pycache__` are left
out, `.gitignore` and `.rayignore` count in every folder, and a pattern without a leading slash matches at any depth.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from collectives.errors import ConfigError
from zenray.environment import CODE_SUFFIXES, code_digest

IGNORE_FILES = (".gitignore", ".rayignore")


@dataclass(frozen=True)
class Package:
    """The files of one working directory as Ray packs them: (path relative to `folder`, bytes), in order of path."""

    folder: Path
    excludes: tuple[str, ...]
    files: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Of the archive, which is not compressed; without its directory."""
        return sum(size for _, size in self.files)

    def largest(self, count: int) -> list[tuple[str, int]]:
        """The largest files."""
        return sorted(self.files, key=lambda file: -file[1])[:count]

    def digest(self) -> str:
        """See `code_digest`."""
        return code_digest(self.folder, [name for name, _ in self.files])


def package_of(folder: Path, excludes: Sequence[str] = ()) -> Package:
    """Select what Ray would pack. Raises ConfigError if `folder` is no folder."""
    folder = folder.absolute()
    if not folder.is_dir():
        raise ConfigError(f"working_dir {folder} is not a folder")
    found: list[tuple[str, int]] = []

    def keep(path: Path) -> None:
        if path.is_file():
            found.append((str(path.relative_to(folder)), path.stat().st_size))

    matcher = _get_excludes(folder, [*get_runtime_env_default_excludes(), *excludes])
    heeds_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE) != "1"
    _dir_travel(folder, [matcher], keep, include_gitignore=heeds_git, logger=logging.getLogger(__name__))
    return Package(folder, tuple(excludes), tuple(sorted(found)))


def tracked_sources(folder: Path) -> list[str]:
    """Source files below `folder` that git knows; empty where there is no git or no repository."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "-z", "--", *(f"*{suffix}" for suffix in CODE_SUFFIXES)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [name for name in names if name and (folder / name).is_file()]


def culprits(package: Package, name: str) -> list[str]:
    """The patterns that leave out `name`, each with where it stands."""
    found = [f"excludes: {p}" for p in (*package.excludes, *get_runtime_env_default_excludes()) if _matches(p, name)]
    parts = Path(name).parts
    for depth in range(len(parts)):
        base = package.folder.joinpath(*parts[:depth])
        for file in IGNORE_FILES:
            if (base / file).is_file():
                lines = (base / file).read_text(encoding="utf-8", errors="replace").splitlines()
                where = str((base / file).relative_to(package.folder))
                found += [f"{where}: {line}" for line in lines if _matches(line, str(Path(*parts[depth:])))]
    return found


def catch_alls(package: Package) -> list[str]:
    """The patterns, each with where it stands, that match the folder itself or any file."""
    return sorted({*culprits(package, "."), *culprits(package, "any.py")})


def _matches(pattern: str, name: str) -> bool:
    return bool(_get_excludes(Path(), [pattern])(Path(name)))
