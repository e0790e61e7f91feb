"""OpenSSH between hosts that tests make: a server on each, and a client that they let in.

The programs are the machine's, else those that are fetched once into build/openssh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.debian_packages import UnavailableError, installed_program
from support.fetch_packages import fetch
from support.once import one_at_a_time
from support.paths import ROOT

_NAMES = ("sshd", "ssh", "ssh-keygen")
_DIRECTORY = ROOT / "build/openssh"
_STEP_SECONDS = 30
_SERVER = """\
HostKey {key}
AuthorizedKeysFile {key}.pub
AuthenticationMethods publickey
PidFile none
StrictModes no
UsePAM no
"""
_CLIENT = """\
User root
IdentityFile {key}
IdentityAgent none
UserKnownHostsFile {known}
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""
# sshd, where root starts it, wants a user "sshd" and a directory of its own. Both are made in a mount namespace, which
# alone sees them, and root's entry there needs no shadow file and has a shell that every machine has.
_START = """\
mount --bind {users} /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -D -e -f {config}
"""
_USERS = """\
root:*:0:0:root:/:/bin/sh
sshd:*:65533:65534::/run/sshd:/bin/false
"""


class SecureShell:
    """sshd on hosts, and a client that has the key to them all.

    Args:
        places: for each host what starts a command on it, which becomes that command.
        directory: for keys and settings.

    Raises:
        UnavailableError: the programs can't be had here, or a server did not start.
    """

    def __init__(self, places: Sequence[Sequence[str]], directory: Path) -> None:
        programs, self._environment = _programs()
        self._servers: list[subprocess.Popen[str]] = []
        key, known, users, server, client = (
            directory / name for name in ("key", "known-hosts", "users", "sshd-config", "ssh-config")
        )
        make_key = [programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
        subprocess.run(make_key, check=True, timeout=_STEP_SECONDS)
        known.write_text(f"* {key.with_suffix('.pub').read_text()}")
        users.write_text(_USERS)
        server.write_text(_SERVER.format(key=key))
        client.write_text(_CLIENT.format(key=key, known=known))
        self.client = directory / "ssh"
        self.client.write_text(f'#!/bin/sh\nexec {shlex.quote(programs["ssh"])} -F {shlex.quote(str(client))} "$@"\n')
        self.client.chmod(0o755)
        start = _START.format(
            users=shlex.quote(str(users)), sshd=shlex.quote(programs["sshd"]), config=shlex.quote(str(server))
        )
        try:
            for place in places:
                self._serve(place, start)
        except BaseException:
            self.close()
            raise

    def _serve(self, place: Sequence[str], start: str) -> None:
        server = subprocess.Popen(
            [*place, "unshare", "--mount", "sh", "-c", start],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self._servers.append(server)
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            if line.startswith("Server listening"):
                return
            said.append(line)
        raise UnavailableError(f"sshd did not start: {''.join(said).strip()}")

    def close(self) -> None:
        """Ends the servers."""
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.communicate(timeout=_STEP_SECONDS)


def _programs() -> tuple[dict[str, str], dict[str, str]]:
    """Where each program is, and the environment in which it finds its libraries."""
    found = {name: installed_program(name) for name in _NAMES}
    if all(found.values()):
        return {name: path for name, path in found.items() if path}, dict(os.environ)
    with one_at_a_time(_DIRECTORY.with_name("openssh.lock")):
        fetch(_DIRECTORY, ("openssh-server", "openssh-client"))
    libraries = os.pathsep.join(map(str, _DIRECTORY.glob("usr/lib/*-linux-gnu")))
    fetched = {name: next(str(path) for path in _DIRECTORY.glob(f"usr/*bin/{name}")) for name in _NAMES}
    return fetched, {**os.environ, "LD_LIBRARY_PATH": libraries}
