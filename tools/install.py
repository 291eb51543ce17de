"""Make `.venv` and install one lock file and the package into it; do nothing where that is done already.

    python3 tools/install.py requirements.lock        (what `make compare` runs first)
    python3 tools/install.py requirements-dev.lock    (what `make test` runs first)

Run it from the repository's root. A stamp in `.venv` says what was installed: it is written last, so that an
interrupted installation is taken up again, and it goes by the files' content, so that a fresh checkout of the same
files installs nothing. Only the standard library is used, in a syntax that a Python too old for qurve can still read:
it must get as far as saying so.
"""
# ruff: noqa: UP031, UP015, UP036

import fcntl
import hashlib
import os
import subprocess
import sys

VENV_PYTHON = os.path.join(".venv", "bin", "python")
RUNTIME, DEVELOPMENT = "requirements.lock", "requirements-dev.lock"
TRITON = "triton==3.7.1"
FIND_TRITON = "import importlib.util as u; raise SystemExit(u.find_spec('triton') is None)"


def main(lock):
    found = "Python %s (%s)" % (sys.version.split()[0], sys.executable)
    if sys.version_info < (3, 11):
        sys.exit("qurve needs Python 3.11 or newer and found %s.\nName another one: make PYTHON=python3.12" % found)
    lock_file = open(__file__)  # noqa: SIM115, held until this process ends
    fcntl.flock(lock_file, fcntl.LOCK_EX)  # two `make`s at once: the second waits, then finds everything there
    make_venv(found)
    # The development lock holds every pin of the runtime's, so it counts as both.
    locks = [RUNTIME, DEVELOPMENT] if lock == DEVELOPMENT else [RUNTIME]
    if read(stamp_of(lock)) == content_of(lock):
        return
    for name in locks:
        if os.path.exists(stamp_of(name)):
            os.remove(stamp_of(name))
    print("Installing %s into .venv: a download of over 0.5 GB, or of 3 GB where torch comes with CUDA." % lock)
    sys.stdout.flush()
    pip("-r", lock)
    pip("--no-build-isolation", "--no-deps", "--editable", ".")
    if lock == DEVELOPMENT:
        add_triton()
    for name in locks:
        with open(stamp_of(name), "w") as file:
            file.write(content_of(name))


def make_venv(found):
    """Make `.venv` with this Python, or check the one that is there."""
    version = "%d.%d" % sys.version_info[:2]
    made = read(os.path.join(".venv", ".made"))
    if made:
        made_version, made_in = made.split(" ", 1)
        if made_in != os.getcwd():
            sys.exit(".venv was made in another folder (%s). Remove it with `make clean`, then try again." % made_in)
        if not os.path.exists(VENV_PYTHON) or subprocess.call([VENV_PYTHON, "-c", ""]) != 0:
            sys.exit(
                ".venv's Python %s is gone or broken. Remove .venv with `make clean`, then try again." % made_version
            )
        if made_version != version:
            print("Using .venv's Python %s, not %s; `make clean` first to change over." % (made_version, found))
        return
    if os.path.exists(os.path.join(".venv", "pyvenv.cfg")) and ("version = %s." % version) not in read(
        os.path.join(".venv", "pyvenv.cfg")
    ):
        sys.exit("There is a .venv of another Python than %s. Remove it with `make clean`, then try again." % found)
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(
            "%s cannot make a virtual environment: its modules venv and ensurepip are missing.\n"
            "On Debian and Ubuntu install the package python%s-venv, then try again." % (found, version)
        )
    print("Making .venv with %s." % found)
    sys.stdout.flush()
    run([sys.executable, "-m", "venv", ".venv"], "the virtual environment .venv could not be made")
    with open(os.path.join(".venv", ".made"), "w") as file:
        file.write("%s %s" % (version, os.getcwd()))


def add_triton():
    """For the tests of the kernels, where torch has not brought its own (its builds for CUDA do) and there is one.

    No lock file can hold it: beside a torch for CUDA another release than that torch's own may not work.
    """
    if sys.platform.startswith("linux") and subprocess.call([VENV_PYTHON, "-c", FIND_TRITON]) != 0:
        pip("--no-deps", TRITON)


def pip(*arguments):
    command = [VENV_PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(command + list(arguments), "pip could not install %s; what it says stands above" % arguments[-1])


def run(command, failure):
    if subprocess.call(command) != 0:
        sys.exit(failure)


def stamp_of(lock):
    return os.path.join(".venv", ".installed-" + lock)


def content_of(lock):
    """What an installation depends on."""
    digest = hashlib.sha256()
    for name in (lock, "pyproject.toml"):
        with open(name, "rb") as file:
            digest.update(file.read())
    if lock == DEVELOPMENT:
        digest.update(TRITON.encode("ascii"))
    return digest.hexdigest()


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path, "r") as file:
        return file.read()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the same command takes it up again.")
