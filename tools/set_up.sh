#!/bin/sh
# Finds a Python 3.11 to 3.13 and runs the set-up (tools/set_up/) with it. PYTHON=/path/to/python chooses one.
cd "$(dirname "$0")/.." || exit 1
if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- python3 python3.12 python3.11 python3.13 python
fi
for candidate in "$@"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        exec "$candidate" -m tools.set_up
    fi
done
if [ -n "${PYTHON:-}" ]; then
    echo "Set-up failed: PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13; name one, or leave PYTHON unset." >&2
else
    echo "Set-up failed: no Python 3.11, 3.12 or 3.13 on PATH; install one, or name it with PYTHON=/path/to/python." >&2
fi
exit 1
