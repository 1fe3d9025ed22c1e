// The one argument of every linear_scan kernel. _launch.py packs the same fields in the same order.
#pragma once

constexpr int kRowDims = 6;  // row axes after neighbours that can be one are merged; the last varies fastest

// Where one array's items are, in bytes. A broadcast axis has stride 0. In reverse, `start` is the last step and `time`
// is negated, so that the kernel only knows the direction of the scan.
struct LinearArray {
  char* start;  // may be null for gate, initial and last
  long long time;
  long long row[kRowDims];
  long long packs;  // may 16-byte accesses be used along time
};

struct LinearArgs {
  LinearArray gate, input, initial, output, last;
  char *summary_gate, *summary_input;  // accumulation type, see linear_scan.cu
  double gate64[2];  // the gate where gate.start is null: real and imaginary part, in its accumulation type
  float gate32[2];
  long long length, rows, row_size[kRowDims];
  long long chunk, chunks;               // steps a chunk, chunks a row; chunk * chunks >= length
  long long summary_row, summary_chunk;  // strides of the summaries, in items
  int row_dims, output_code;
  int row_warps;  // warps that share a row; divides the warps of a block
  // With segments, and else not read:
  LinearArray marks;              // its `time` is not used
  const int* ids;                 // the sequence of each position; null if the rows are not packed. Where they are,
                                  // `time` of initial and last goes from sequence to sequence
  unsigned char* summary_resets;  // indexed like the other summaries
  // In one pass, and else not read: scratch (linear_look_back.cuh), and how many pairs of its cells the launch clears,
  // which does nothing else then.
  char* cells;
  long long cell_pairs;
};
