#pragma once

// Marks what leaves the shared library. Everything else is hidden.
#define BONFIRE_API __attribute__((visibility("default")))
