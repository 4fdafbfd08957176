"""The models of peer_probe as transformers builds them, with the weights that peer_probe wrote."""
import json
import pathlib

import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def llama(index):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=index["vocab"], hidden_size=index["dim"], intermediate_size=index["ffn"], num_hidden_layers=index["layers"],
        num_attention_heads=index["heads"], num_key_value_heads=index["kv_heads"], max_position_embeddings=index["positions"],
        rms_norm_eps=index["norm_eps"], rope_theta=index["rope_theta"], tie_word_embeddings=index["tied"]))


def gpt2(index):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=index["vocab"], n_embd=index["dim"], n_inner=index["ffn"], n_layer=index["layers"], n_head=index["heads"],
        n_positions=index["positions"], layer_norm_epsilon=index["norm_eps"], tie_word_embeddings=index["tied"],
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None))


def blocks(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


class Written:
    """A folder that peer_probe wrote."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.index = json.loads((self.folder / "index.json").read_text())

    def read(self, file, shape):
        return torch.from_numpy(numpy.fromfile(self.folder / file, dtype=numpy.float64)).reshape(shape)

    def build(self, name, dtype):
        """The model with those weights: all of them must be known by their names, and none may be left over."""
        # Tables such as the rotary angles are made in fp32 there, in the default dtype where that is fp64.
        torch.set_default_dtype(dtype)
        try:
            model = (llama if name.startswith("llama") else gpt2)(self.index).to(dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        weights = {item["name"]: self.read(item["name"], item["shape"]).to(dtype) for item in self.index["parameters"]}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        # A tied head has no weight of its own; what else is missing must be no parameter.
        parameters = {key for key, _ in model.named_parameters()}
        missing = [key for key in missing if key in parameters]
        if missing or unexpected:
            raise AssertionError(f"missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        return model
