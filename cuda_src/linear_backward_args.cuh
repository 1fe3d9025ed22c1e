// The one argument of every linear_scan_backward kernel. _linear_backward.py packs the same fields in the same order.
#pragma once
#include "linear_args.cuh"

// How the gradients of gates come out: one for each step, or where a gate is shared, summed as far as one kernel can.
enum GateSums { kEachStep = 0, kOverTime = 1, kOverLanes = 2 };

struct LinearBackwardArgs {
  // As the walk from the last step to the first sees them: gate a, input grad_h (may be null), initial grad_last_state,
  // output grad_b, last grad_h0. But marks and ids are in the order of the scan.
  LinearArgs scan;
  LinearArray states;     // h; null where no gradient of the gates is wanted
  LinearArray entering;   // h0; with packed sequences, `time` goes from sequence to sequence
  LinearArray grad_gate;  // null like h; kOverTime: `time` goes from a warp of a row's chunk to the next
  int grad_gate_code;
  int wide_input, wide_states;  // in the accumulation type where the gates have 16 bits
  int sums;                     // GateSums
  int summarise;                // leave the chunks' maps, and nothing else
};
