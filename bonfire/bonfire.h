#pragma once

// The public face of Bonfire: what a program that trains with it includes. Include torch's own headers beside it as needed.

#include "bonfire/base/error.h"
#include "bonfire/base/log.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/world.h"
