#!/usr/bin/env bash
# Measure everything in docs/results/comm_hooks_figures.md; takes about 20 minutes.
#
#   sudo benchmarks/comm_hooks_figures.sh FOLDER
#
# Use a machine that does nothing else: other work makes every ratio worse. Needs root, network
# namespaces, and cubic and bbr in net.ipv4.tcp_allowed_congestion_control. Writes a text file to
# FOLDER for each command, with the command in its first line.
# Set PYTHON to use another interpreter than .venv/bin/python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"

part link_4 benchmarks.shaped_link --rounds 3 --only compute "torch fp16" fp16
part link_4_bbr benchmarks.shaped_link --congestion bbr --rounds 3 --only compute "torch fp16" fp16
part link_2x2 benchmarks.shaped_link --hosts 2 --local 2 --rounds 3 \
    --only compute "torch fp16" fp16 int8
part link_1gbit benchmarks.shaped_link --rate 1gbit --rounds 5 --only compute "torch fp16" fp16
part link_fsdp2_2x1 benchmarks.shaped_link --wrapper fsdp2 --hosts 2 --rate 1gbit --rounds 2
part link_fsdp2 benchmarks.shaped_link --wrapper fsdp2 --hosts 2 --local 2 --rate 1gbit --rounds 2
part host benchmarks.comm_hooks_host
part lanes benchmarks.comm_hooks_lanes
part scaler benchmarks.comm_hooks_scaler
part ends benchmarks.comm_hooks_ends --times 50
part loopback benchmarks.comm_hooks_step --rounds 10 --wires fp16
part wire_error benchmarks.wire_error
part wire_cost benchmarks.wire_cost --rounds 20
