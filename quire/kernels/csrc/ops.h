// All ops, for one instruction set. Included by isa_*.cpp inside a namespace.
#pragma once

#include "parallel.h"
#include "simd.h"

// What REGISTER_OP adds to. The numbers come from __COUNTER__, which others may use too, so there may be gaps.
template <int number>
constexpr OpEntry REGISTERED = {};

#include "ops/act_and_mul.h"
#include "ops/activation.h"
#include "ops/add_rows.h"
#include "ops/add_scaled.h"
#include "ops/alibi_decode.h"
#include "ops/build_inputs.h"
#include "ops/causal_conv.h"
#include "ops/choose_experts.h"
#include "ops/clamped_swiglu.h"
#include "ops/copy_rows.h"
#include "ops/decode_steps.h"
#include "ops/gated_delta_rule.h"
#include "ops/gated_linear_recurrence.h"
#include "ops/gated_rms_norm.h"
#include "ops/grouped_linear.h"
#include "ops/grouped_rows.h"
#include "ops/head_linear.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/multiply.h"
#include "ops/paged_decode.h"
#include "ops/paged_varlen.h"
#include "ops/output_gate.h"
#include "ops/qk_norm_rope.h"
#include "ops/rms_norm.h"
#include "ops/run_experts.h"
#include "ops/sampling.h"
#include "ops/selected_attention.h"
#include "ops/selective_scan.h"
#include "ops/softcap.h"
#include "ops/state_space_scan.h"
#include "ops/streams.h"
#include "ops/take_rows.h"
#include "ops/token_bitmask.h"
#include "ops/token_logprobs.h"
#include "ops/varlen_attention.h"
#include "ops/write_pages.h"
#include "ops/xielu.h"

template <class>
struct Entries;
template <int... numbers>
struct Entries<std::integer_sequence<int, numbers...>> {
    static constexpr OpEntry all[] = {REGISTERED<numbers>...};
};
constexpr const auto &ENTRIES = Entries<std::make_integer_sequence<int, __COUNTER__>>::all;
extern const OpTable ops = {ENTRIES, std::size(ENTRIES)};
