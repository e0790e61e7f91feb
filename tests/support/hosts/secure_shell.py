"""OpenSSH between emulated hosts (networks.py): a server on each host, and a client that may log in to all hosts.
Programs that are not installed are fetched once into build/openssh.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from support.packages.debian import UnavailableError
from support.packages.fetched import FetchedPackages, installed_program

_PACKAGES = FetchedPackages("openssh", "fetch_packages.py", "openssh-server", "openssh-client")
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
_CLIENT_PROGRAM = """\
#!/bin/sh
LD_LIBRARY_PATH={libraries} exec {ssh} -F {config} "$@"
"""
# If started by root, sshd needs a user "sshd" and a directory /run/sshd, which are made in a private mount namespace.
# Root's entry in the passwd file needs no shadow file, and names a shell that every machine has.
_START = """\
mount --bind {users} /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -D -e -f {config}
"""
_USERS = """\
root:*:0:0:root:/:/bin/sh
sshd:*:65533:65534::/run/sshd:/bin/false
"""


class SecureShell:
    """sshd on each host, and a client with the key to all hosts.

    Args:
        places: for each host, a command prefix that executes a command on it.
        directory: directory for keys and settings.

    Raises:
        UnavailableError: the programs are not available, or a server did not start.
    """

    def __init__(self, places: Sequence[Sequence[str]], directory: Path) -> None:
        if any(installed_program(name) is None for name in ("sshd", "ssh", "ssh-keygen")):
            _PACKAGES.fetch()
        self._environment = _PACKAGES.environment()
        self._servers: list[subprocess.Popen[str]] = []
        key, known, users, server, client = (
            directory / name for name in ("key", "known-hosts", "users", "sshd-config", "ssh-config")
        )
        make_key = [_PACKAGES.program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
        subprocess.run(make_key, check=True, timeout=_STEP_SECONDS, env=self._environment)
        known.write_text(f"* {key.with_suffix('.pub').read_text()}")
        users.write_text(_USERS)
        server.write_text(_SERVER.format(key=key))
        client.write_text(_CLIENT.format(key=key, known=known))
        self.client = directory / "ssh"
        self.client.write_text(
            _CLIENT_PROGRAM.format(
                libraries=shlex.quote(self._environment.get("LD_LIBRARY_PATH", "")),
                ssh=shlex.quote(_PACKAGES.program("ssh")),
                config=shlex.quote(str(client)),
            )
        )
        self.client.chmod(0o755)
        start = _START.format(
            users=shlex.quote(str(users)), sshd=shlex.quote(_PACKAGES.program("sshd")), config=shlex.quote(str(server))
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
        too_late = threading.Timer(_STEP_SECONDS, server.kill)
        too_late.start()
        try:
            for line in server.stderr:
                if line.startswith("Server listening"):
                    return
                said.append(line)
        finally:
            too_late.cancel()
        raise UnavailableError(f"sshd did not start: {''.join(said).strip()}")

    def close(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(_STEP_SECONDS)
            assert server.stderr is not None
            server.stderr.close()  # the pipe is not read to its end, because sessions keep it open
