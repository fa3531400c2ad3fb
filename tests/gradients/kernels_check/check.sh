#!/usr/bin/env bash
# Builds the kernels with check.c and runs it: check.sh BUILD. By hand: some builds take minutes.
#   sanitized   GCC with the address and undefined-behaviour sanitizers
#   clang       Clang, without OpenMP's threads
#   plain       as a compiler without GNU's extensions would see it: strict C11, no vectors, no OpenMP
#   arm         64-bit ARM, cross-compiled and emulated (gcc-aarch64-linux-gnu, qemu-user)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernels=$here/../../../src/sfumato/gradients/kernels
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-Wall -Wextra -Werror -I "$kernels" "$kernels"/*.c "$here/check.c" -o "$work/check")
run=()
case ${1:-} in
    sanitized)
        gcc -O1 -std=gnu11 -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=all "${flags[@]}" -lm
        # GCC's OpenMP keeps its threads until the end.
        export ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2
        ;;
    clang) clang -O3 -std=gnu11 -fopenmp-simd -DOPENMP_SIMD "${flags[@]}" -lm ;;
    plain) gcc -O3 -std=c11 -Wpedantic -D_WIN32 "${flags[@]}" -lm ;;
    arm)
        aarch64-linux-gnu-gcc -O3 -std=gnu11 -static "${flags[@]}" -lm
        run=(qemu-aarch64)
        ;;
    *)
        sed -n '2,6s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
"${run[@]}" "$work/check"
