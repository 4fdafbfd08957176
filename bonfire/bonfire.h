#pragma once

// The public face of Bonfire: what a program that trains with it includes. Include torch's own headers beside it as needed.

#include "bonfire/base/error.h"
#include "bonfire/base/log.h"
#include "bonfire/base/random.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/join.h"
#include "bonfire/comm/launch.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/comm/world.h"
#include "bonfire/data/classes.h"
#include "bonfire/data/loader.h"
#include "bonfire/data/markov.h"
#include "bonfire/data/token_files.h"
#include "bonfire/models/model.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/learning_rate.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
