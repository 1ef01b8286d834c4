#!/usr/bin/env bash
# Checks the models of the fence with spin: the design must hold in every state, each broken variant must fail.
#
#   run.sh            one line for each check
#   run.sh --steps    also the steps of each counterexample
#
# Exit status: 0 when all is as it must be, 1 when a check came out wrong, 2 when a tool is missing or the usage is wrong.
# All generated files are in a temporary folder, which goes when the script ends. Memory: about 2 GB.
set -euo pipefail

steps=false
case "${1:-}" in
    '') ;;
    --steps) steps=true ;;
    *) echo "usage: run.sh [--steps]" >&2; exit 2 ;;
esac

missing=()
command -v spin > /dev/null || missing+=(spin)
command -v gcc > /dev/null || missing+=(gcc)
if ((${#missing[@]} > 0)); then
    echo "The model checker needs ${missing[*]}. Install: apt-get install spin gcc libc6-dev (Debian, Ubuntu)," \
        "dnf install spin gcc (Fedora), brew install spin gcc bash (macOS)." >&2
    exit 2
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'trap "" TERM; kill $(jobs -p) 2> /dev/null || true; wait; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

# verify FOLDER KIND MODEL SWITCH...: generates, compiles and runs one check; leaves FOLDER/log and perhaps FOLDER/steps.
verify() {
    local kind=$2 model=$here/$3 optimize=-O0 compile search
    cd "$1"
    shift 3
    case $kind in
        holds) optimize=-O2 compile=(-DSAFETY) search=(-E -m100000 -w24) ;;
        fails) compile=(-DSAFETY -DBFS) search=(-E -w20) && set -- "$@" -DSHORTEST ;;
        moves | stalls) compile=(-DNP -DNFAIR=3) search=(-l -f -m100000) ;;
    esac
    cp "$model" model.pml
    spin -a "$@" model.pml > log 2>&1
    gcc $optimize -w -DMEMLIM=8000 "${compile[@]}" -o pan pan.c >> log 2>&1
    ./pan "${search[@]}" >> log 2>&1 || true
    if [[ -f model.pml.trail ]]; then
        spin -t "$@" model.pml 2>&1 | sed -nE 's/^ *((producer|poller|unrelated|id) .*|poller: .*|<<<<<START OF CYCLE.*)$/    \1/p' > steps || true
    fi
}

names=() kinds=() failed=0
slots=$(getconf _NPROCESSORS_ONLN 2> /dev/null || echo 2)

# check KIND NAME MODEL SWITCH...: starts a check as soon as a processor is free.
#   holds, fails   an assertion: no state breaks it, or there is a (shortest) way to break it
#   moves, stalls  progress: there is no cycle without it, or there is one
check() {
    local kind=$1 name=$2 n=${#names[@]}
    shift 2
    names+=("$name") kinds+=("$kind")
    mkdir "$work/$n"
    while (($(jobs -rp | wc -l) >= slots)); do wait -n || true; done
    verify "$work/$n" "$kind" "$@" &
}

# Prints how one check came out.
judge() {
    local n=$1 log=$work/$1/log kind=${kinds[$1]} states seconds good=false
    states=$(sed -nE 's/^ *([0-9.e+]+) states, stored.*/\1/p' "$log")
    seconds=$(sed -nE 's/^pan: elapsed time ([0-9.e+-]+) seconds.*/\1/p' "$log")
    case $kind in
        holds | moves)
            if grep -q 'errors: 0$' "$log" && ! grep -qE 'Search not completed|max search depth too small' "$log"; then good=true; fi
            ;;
        fails) if grep -q 'errors: 1$' "$log" && grep -q 'assertion violated' "$log"; then good=true; fi ;;
        stalls) if grep -q 'errors: 1$' "$log" && grep -q 'non-progress cycle' "$log"; then good=true; fi ;;
    esac
    if ! $good; then
        failed=$((failed + 1))
        printf 'WRONG  %s: it should have been "%s"\n' "${names[n]}" "$kind"
        sed '/^Depth=/d; /^unreached/,$d' "$log"
    elif [[ $kind == holds || $kind == moves ]]; then
        printf '%-6s %s: no error in %s states (%s s)\n' "$kind" "${names[n]}" "$states" "${seconds:-0}"
    else
        printf '%-6s %s: as it must\n' "$kind" "${names[n]}"
    fi
    if [[ -s $work/$n/steps ]] && { $steps || ! $good; }; then cat "$work/$n/steps"; fi
}

start=$SECONDS

# The design.
for head in exact visible; do
    h=-DHEAD_${head^^}
    check holds "design, $head head, 3 producers, an unrelated transaction" fence.pml "$h"
    check holds "design, $head head, 3 producers, 3 turns" fence.pml "$h" -DTURNS=3 -DUNRELATED=0
    check holds "design, $head head, 2 producers, savepoint, PREPARE, an unrelated transaction" \
        fence.pml "$h" -DPRODUCERS=2 -DSAVEPOINTS=1 -DPREPARES=1
    check holds "design, $head head, 2 producers with 2 transactions each" fence.pml "$h" -DPRODUCERS=2 -DROUNDS=2 -DUNRELATED=0
done

# Is there anything to see? Each of these says "this never happens" of something that does.
for head in exact visible; do
    for reach in XID LOCK FULL; do
        check fails "reachable, $head head: $reach" fence.pml "-DHEAD_${head^^}" -DREACH_$reach -DPRODUCERS=2 -DUNRELATED=0
    done
done

# The design with one protection taken out.
for head in exact visible; do
    for broken in RAW XMAX EARLY_XID ID_FIRST CACHE LOOK_FIRST LOOK_SAME BY_PID BY_SAVEPOINT OLD_ROWS; do
        extra=(-DPRODUCERS=2)
        case $broken in
            CACHE) extra=(-DPRODUCERS=2 -DROUNDS=2) ;;
            BY_PID) extra=(-DPRODUCERS=2 -DPREPARES=1) ;;
            BY_SAVEPOINT) extra=(-DPRODUCERS=2 -DSAVEPOINTS=1) ;;
        esac
        check fails "$broken, $head head" fence.pml "-DHEAD_${head^^}" "-D$broken" -DUNRELATED=0 "${extra[@]}"
    done
done
check fails "FORGET, exact head" fence.pml -DHEAD_EXACT -DFORGET -DPRODUCERS=2 -DUNRELATED=0
check fails "HEAD_PLAIN" fence.pml -DHEAD_PLAIN -DPRODUCERS=2 -DUNRELATED=0

# Progress under nonstop traffic.
check moves "progress" progress.pml
check moves "progress, an unrelated transaction that never ends" progress.pml -DUNRELATED
check stalls "progress, OVERWRITE" progress.pml -DOVERWRITE
check stalls "progress, EXCHANGE_OFTEN, an unrelated transaction" progress.pml -DEXCHANGE_OFTEN -DUNRELATED
check stalls "progress, NO_LOOK, an unrelated transaction" progress.pml -DNO_LOOK -DUNRELATED

wait
for n in "${!names[@]}"; do judge "$n"; done

if ((failed > 0)); then
    echo "$failed of ${#names[@]} checks came out wrong ($((SECONDS - start)) s)"
    exit 1
fi
echo "all ${#names[@]} checks came out as they must ($((SECONDS - start)) s)"
