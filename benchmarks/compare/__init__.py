"""Methods of data-parallel training side by side on a shaped link between hosts (docs/RESULTS.md).

    python -m benchmarks.compare --r 0.45 --gas 8
    python -m benchmarks.compare --rate 100mbit --methods compute zero1 ddp fsdp2 acco
    python -m benchmarks.compare --gas 4 --sweep r 0.05 0.45 1 2

One rank on each host of a cluster in a box. `--r` asks for a link on which one exchange (reduce-scatter and all-gather
of the real collectives) takes r times the compute of an update (k micro-batches): both are measured at the start, and
the link's rate is chosen by them. `--rate` gives the rate instead; without either the link is as fast as the machine.

All methods train the same model from the same weights on the same batches, with AdamW of the same settings and the same
clipping; those that are exact must be at the same weights after the warm-up, or the run fails. They take turns (A B C
A B C ...) in the same processes. A turn is one update to get going and `--block` timed ones, from the end of an update
to the end of an update: what was in flight at the start of the clock stands for what is in flight at its end, so that
no method is charged for being stopped. `compute` is forward and backward of the bare model, each rank by itself, for as
long as a turn of compute takes.

The columns, besides tokens per second (median, smallest, largest over turns) and their ratios, turn by turn, to the
faster ZeRO-1 and to compute:

    s/update   seconds of an update, median
    mb/upd     micro-batches of all ranks in an update
    exposed    share of an update beyond the compute of its micro-batches: communication and optimizer
    MB/upd     bytes that a rank's interface sent per update, headers included (10^6)
    peak MB    by how much the resident memory of a process grows that trains with this method only (before the turns)
    halves     share of the rounds that were halves of an update (`auto` may choose others)
    lane cpu   CPU time of the lane's thread over compute; all cpu: of all threads but the main one. On CPUs these
               share the ranks' cores, which on a GPU they do not: overlap means something only where they are small
    model      how far the cost model is off, fed with the compute of the turns without communication and with the
               collectives measured alone after each turn (medians); hosts of unequal speed are simulated

`--sweep PARAMETER VALUE ...` makes such a run for each value, and a summary of them. `--out FOLDER` gets the tables,
the JSON and the pictures.
"""
