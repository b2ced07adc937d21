// Python functions from C++ functions with typed parameters.
#pragma once

#include "convert.h"

#include <array>
#include <tuple>
#include <utility>

// Sorts the arguments of a call by parameter: positional ones first, then keywords. Returns false with a TypeError set.
bool arrange_arguments(const char *function, const char *const *parameters, size_t count, PyObject *const *values,
                       Py_ssize_t positional, PyObject *keywords, PyObject **out);

// Turns the exception that is being handled into a Python error: TypeError, ValueError and bad_alloc.
void set_python_error(const char *function);

// Calls body() and returns what it returns, or null with a Python error set if it throws.
template <class Body>
PyObject *with_python_errors(const char *function, Body body) {
    try {
        return body();
    } catch (const std::exception &) {
        set_python_error(function);
        return nullptr;
    }
}

// Converts the arguments of a call to the types of a function's parameters and passes them on to it.
template <class Result, class... Parameters, size_t... index>
Result apply(Result (*function)(Parameters...), const char *const *names, PyObject *const *values,
             std::index_sequence<index...>) {
    std::tuple<std::decay_t<Parameters>...> arguments{  // braces: from left to right
        Convert<std::decay_t<Parameters>>::from_python(values[index], names[index])...};
    return std::apply(function, std::move(arguments));
}

template <class Result, class... Parameters>
constexpr size_t parameter_count(Result (*)(Parameters...)) {
    return sizeof...(Parameters);
}

// Calls `function` with the arguments of a Python call; `finish` makes a Python object of its result.
template <auto function, size_t count, class Finish>
PyObject *call_function(const char *name, const char *const (&parameters)[count], PyObject *const *values,
                        Py_ssize_t positional, PyObject *keywords, Finish finish) {
    static_assert(count == parameter_count(function), "a name for each parameter");
    PyObject *arranged[count];
    if (!arrange_arguments(name, parameters, count, values, positional, keywords, arranged)) return nullptr;
    return with_python_errors(name, [&] {
        return finish(apply(function, parameters, arranged, std::make_index_sequence<count>{}));
    });
}
