# What the scripts that measure all figures of a page have in common; they source it.
#
# Sets `folder` to the folder that the script is given and defines `part`; leaves the shell in the
# root of the repository. Set PYTHON to use another interpreter than .venv/bin/python.

if [[ $# -ne 1 ]]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1

# part NAME MODULE ARGUMENTS...
part() {
    local name=$1 begun=$SECONDS status=0
    shift
    echo "\$ python -m $*" >"$folder/$name.txt"
    "$python" -m "$@" >>"$folder/$name.txt" 2>&1 || status=$?
    echo "$name: exit $status after $((SECONDS - begun)) s" | tee -a "$folder/summary.txt"
}

date -u +"%Y-%m-%d %H:%M UTC" >"$folder/summary.txt"
