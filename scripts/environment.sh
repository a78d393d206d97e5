# Sourced by the other scripts: `set_up EXTRA...` makes .venv with what the project and those extras need.
# A torch of 2.11 to 2.14 that the Python found already has is kept. PYTHON names another Python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
# Packages are installed without bytecode (below): where an import may not write it, every process compiles torch anew, for 8 s.
unset PYTHONDONTWRITEBYTECODE

set_up() {
    local stamp
    stamp=$venv/.installed-$(cat "$root/pyproject.toml" <(echo "$@") | cksum | cut -d ' ' -f 1)
    if [ -e "$stamp" ]; then
        return
    fi
    mkdir -p "$venv"
    if command -v flock >/dev/null; then  # one at a time; the other finds the work done
        exec 9> "$venv/.lock"
        flock 9
    fi
    if [ ! -e "$stamp" ]; then
        make_environment "$stamp" "$@"
    fi
    exec 9>&-
}

make_environment() {
    local base stamp=$1
    shift
    base=$(find_python)
    echo "setting up $venv with $("$base" --version)"
    [ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
    share_torch "$base"
    # Requirements only: the program runs in place. A torch that is there stays as it is.
    "$venv/bin/python" - "$root/pyproject.toml" "$@" > "$venv/requirements.txt" <<'PYTHON'
import importlib.util, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]

def packages(extras):
    for line in (line for extra in extras for line in project["optional-dependencies"][extra]):
        name, _, others = line.rstrip("]").partition("[")
        yield from packages(others.split(",")) if name == project["name"] else [line]

print(*project["dependencies"], *packages(sys.argv[2:]), sep="\n")
if importlib.util.find_spec("torch"):
    import torch
    print("torch==" + torch.__version__.split("+")[0])
else:
    print("torch==2.13.0")
PYTHON
    # Only what is imported is worth compiling to bytecode, which importing it does.
    local install=("$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check)
    "${install[@]}" -r "$venv/requirements.txt"
    # A test compares its Inception network, for which torchvision and the other requirements are not needed.
    # Its wheel has a folder `tests` too, which processes without this folder on their path would take for ours.
    if [[ " $* " == *" test "* ]]; then
        "${install[@]}" --no-deps torch-fidelity==0.4.0
        rm -rf "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests"
    fi
    # Most of that is done here, by two processes, instead of by each of those that a test run starts at once.
    "$venv/bin/python" -c 'import torch._dynamo' &
    "$venv/bin/python" -c 'import sklearn.datasets'
    wait
    touch "$stamp"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "no Python 3.11 or later found (install one, or set PYTHON to its path)" >&2
    return 1
}

# Let the environment see the packages of the Python it is made from, if there is a torch to keep among them.
share_torch() {
    local packages
    packages=$("$1" - <<'PYTHON' 2>/dev/null || true
import importlib.util, sysconfig
if importlib.util.find_spec("torch"):
    import torch
    if (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        print(torch.__path__[0].rpartition("/")[0])
PYTHON
    )
    if [ -n "$packages" ]; then
        echo "keeping the torch in $packages"
        echo "$packages" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared_torch.pth"
    fi
}
