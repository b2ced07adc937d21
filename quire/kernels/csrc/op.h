// Ops: kernels with the checks of their arguments and the Python function that calls them.
//
// An op is a struct in a header under ops/, which ops.h includes. It is compiled once for each instruction set:
//
//     struct Double {  // the arguments that the kernel needs: pointers, sizes, strides
//         static constexpr const char *NAME = "double";
//         static constexpr const char *PARAMETERS[] = {"x", "out"};
//         static Double check(const Tensor &x, const Tensor &out);  // checks shapes and dtypes, once per call
//         void run() const;                                         // the kernel
//         int64_t work() const { return rows * dim; }               // elements that the kernel goes through, about
//         int64_t &row_count() { return rows; }                     // what a replay changes
//         const float *x;
//         float *out;
//         int64_t rows, dim;
//     };
//     REGISTER_OP(Double);
//
// The Python function that calls it is in quire/kernels/. It allocates outputs with `empty` of quire/kernels/capture.py, not with
// torch.empty: a replay writes to the addresses that were captured. After a change here: python setup.py build_ext --inplace
//
// An op may have `const PanelWeight *following`, where a capture says which weight is read after its own, and
// panel_weight(), its own.
//
// An op whose run() returns something, or which has no row_count(), cannot be part of a complete capture.
#pragma once

#include "capture.h"
#include "function.h"

typedef PyObject *(*OpFunction)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

struct OpEntry {
    const char *name = nullptr;
    const char *const *parameters = nullptr;
    size_t parameter_count = 0;
    OpFunction call = nullptr;
};

struct OpTable {
    const OpEntry *entries;
    size_t count;  // entries without a name are to be skipped
};

constexpr int64_t UNLOCKED_WORK = 1 << 16;  // elements from which on other Python threads may run during a kernel

// Runs body() without the interpreter's lock if the work is worth it. Python may end a thread that takes the lock while the
// interpreter exits, by unwinding its stack: this may not happen in a destructor, nor be caught as an exception.
template <class Body>
auto run_unlocked(int64_t work, Body body) {
    if (work < UNLOCKED_WORK) return body();
    PyThreadState *state = PyEval_SaveThread();
    try {
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            PyEval_RestoreThread(state);
        } else {
            auto result = body();
            PyEval_RestoreThread(state);
            return result;
        }
    } catch (const std::exception &) {
        PyEval_RestoreThread(state);
        throw;
    }
}

template <class Op>
PyObject *run_op(const Op &op) {
    if constexpr (!std::is_void_v<decltype(op.run())>) {
        if (current_capture) current_capture->set_incomplete();
        return to_python(run_unlocked(op.work(), [&] { return op.run(); }));
    } else {
        if (!current_capture || current_capture->runs) run_unlocked(op.work(), [&] { op.run(); });
        if (current_capture) {
            if constexpr (requires(Op call) { call.row_count(); }) {
                Op call = op;
                if constexpr (requires { call.following; }) call.following = current_capture->add_weight(call.panel_weight());
                current_capture->add(call.row_count(), [call](int64_t rows) mutable { call.row_count() = rows, call.run(); });
            } else {
                current_capture->set_incomplete();
            }
        }
        Py_RETURN_NONE;
    }
}

template <class Op>
PyObject *call_op(PyObject *, PyObject *const *values, Py_ssize_t positional, PyObject *keywords) {
    return call_function<&Op::check>(Op::NAME, Op::PARAMETERS, values, positional, keywords, run_op<Op>);
}

template <class Op>
constexpr OpEntry entry_of() {
    return {Op::NAME, Op::PARAMETERS, std::size(Op::PARAMETERS), call_op<Op>};
}

// Adds an op to the table of the instruction set that is being compiled; see ops.h.
#define REGISTER_OP(Op) \
    template <>         \
    constexpr OpEntry REGISTERED<__COUNTER__> = entry_of<Op>()
