// The one argument of sum_partials. _selective_backward.py packs the same fields in the same order.
#pragma once

constexpr int kJobs = 5;

struct SumJob {
  const char* from;  // (parts, count) of the type that is summed in
  char* to;          // (count,)
  long long count, parts;
  int code, size;  // of an item of `to`
};

struct SumArgs {
  SumJob jobs[kJobs];
  long long items;  // of all jobs
};
