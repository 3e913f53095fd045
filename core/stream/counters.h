// Process totals and the summary line (RSOCK_SUMMARY).
//
// Thread safety: any thread. The totals hold what closed streams did; the summary adds the live
// ones.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// A stream that ends: its bytes, moves and reasons go to the totals.
void add_to_totals(Stream& s) noexcept;
/// A peer sent something that was refused (rendezvous, ring, kick): counted under its reason.
void count_refusal(Reason reason) noexcept;
/// A lifted stream goes back to TCP: counted under its reason.
void count_set_down(Reason reason) noexcept;
/// Appends the JSON line of the contract to RSOCK_SUMMARY. Once per process; later calls do
/// nothing.
void write_summary() noexcept;
/// exec replaces the process image: the line is written now, and again later should exec fail.
void write_summary_for_exec() noexcept;
/// A forked child counts for itself.
void counters_after_fork_child() noexcept;

}  // namespace rsock::stream
