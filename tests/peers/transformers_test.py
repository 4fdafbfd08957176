"""Our llama and gpt2 are the functions that transformers knows by those names: same weights, same logits, loss, gradients."""
import json
import pathlib
import tempfile
import unittest

import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from probe import probe


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


class Transformers(unittest.TestCase):
    def check(self, name, make):
        with tempfile.TemporaryDirectory() as text:
            folder = pathlib.Path(text)
            probe("model", name, folder)
            index = json.loads((folder / "index.json").read_text())

            def read(file, shape):
                return torch.from_numpy(numpy.fromfile(folder / file, dtype=numpy.float64)).reshape(shape)

            # Tables such as the rotary angles are made in fp32 there, in the default dtype where that is fp64.
            torch.set_default_dtype(torch.float64)
            try:
                model = make(index).double().eval()
            finally:
                torch.set_default_dtype(torch.float32)
            weights = {item["name"]: read(item["name"], item["shape"]) for item in index["parameters"]}
            missing, unexpected = model.load_state_dict(weights, strict=False)
            self.assertEqual(unexpected, [])
            # A tied head has no weight of its own; what else is missing must be no parameter.
            parameters = {key for key, _ in model.named_parameters()}
            self.assertEqual([key for key in missing if key in parameters], [])
            model.tie_weights()

            tokens = read("input", (2, 32)).long()
            target = read("target", (2, 32)).long()
            logits = model(tokens).logits
            ours = read("logits", (2, 32, index["vocab"]))
            self.assertGreater(ours.std().item(), 1e-3)
            self.assertLess((logits - ours).abs().max().item(), 1e-6 * ours.abs().max().item())
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            self.assertAlmostEqual(loss.item(), index["loss"], delta=1e-6 * loss.item())
            loss.backward()
            norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt().item()
            self.assertAlmostEqual(norm, index["gradient_norm"], delta=1e-5 * norm)

    def test_llama(self):
        self.check("llama", llama)

    def test_llama_with_a_tied_head(self):
        self.check("llama-tied", llama)

    def test_gpt2(self):
        self.check("gpt2", gpt2)


if __name__ == "__main__":
    unittest.main()
