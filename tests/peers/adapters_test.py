"""Adapters as PEFT's files, out of Bonfire and into it: PEFT's merged weights are ours."""
import importlib.util
import json
import pathlib
import subprocess
import tempfile
import unittest

import torch

from probe import BUILD

SOURCE = pathlib.Path(__file__).resolve().parents[2]
COMMAND = BUILD / "bonfire"
HAS_PEFT = importlib.util.find_spec("peft") is not None

spec = importlib.util.spec_from_file_location("read_checkpoint", SOURCE / "examples" / "read_checkpoint.py")
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)

RUN = """
[run]
name = "{name}"
device = "cpu"
[model]
{model}
dim = 16
layers = 2
vocab = 64
[data]
sequence = 8
[train]
steps = 4
batch = 12
[optimizer]
lr = 0.01
warmup = 1
{more}
"""

LLAMA = 'type = "llama"\nheads = 4\nkv_heads = 2\nffn = 24'
GPT2 = 'type = "gpt2"\nheads = 2\ntied = true'


def bonfire(folder, *words):
    done = subprocess.run([COMMAND, *map(str, words)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


def newest(folder):
    checkpoints = folder / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def parameters_of(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    return {t["name"]: reader.read(folder, t) for t in manifest["tensors"] if t["kind"] == "value"}


def public_llama(own):
    out = {"model.embed_tokens.weight": own["embedding.tokens.weight"], "model.norm.weight": own["head.norm.weight"],
           "lm_head.weight": own["head.output.weight"]}
    for i in range(2):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = own[ours + "attention.qkv.weight"].split([16, 8, 8])
        gate, up = own[ours + "feed.gate_up.weight"].split([24, 24])
        out |= {theirs + "input_layernorm.weight": own[ours + "attention_norm.weight"],
                theirs + "post_attention_layernorm.weight": own[ours + "feed_norm.weight"],
                theirs + "self_attn.q_proj.weight": q, theirs + "self_attn.k_proj.weight": k,
                theirs + "self_attn.v_proj.weight": v,
                theirs + "self_attn.o_proj.weight": own[ours + "attention.output.weight"],
                theirs + "mlp.gate_proj.weight": gate, theirs + "mlp.up_proj.weight": up,
                theirs + "mlp.down_proj.weight": own[ours + "feed.down.weight"]}
    return out


def public_gpt2(own):
    out = {"transformer.wte.weight": own["tokens"], "transformer.wpe.weight": own["embedding.positions"],
           "transformer.ln_f.weight": own["head.norm.weight"], "transformer.ln_f.bias": own["head.norm.bias"],
           "lm_head.weight": own["tokens"]}
    names = {"attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "feed_norm": "ln_2",
             "feed.up": "mlp.c_fc", "feed.down": "mlp.c_proj"}
    for i in range(2):
        for ours, theirs in names.items():
            weight = own[f"blocks.{i}.{ours}.weight"]
            out[f"transformer.h.{i}.{theirs}.weight"] = weight.t() if weight.dim() == 2 else weight
            out[f"transformer.h.{i}.{theirs}.bias"] = own[f"blocks.{i}.{ours}.bias"]
    return out


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2))


KINDS = {"llama": (LLAMA, public_llama, llama, ["q_proj", "v_proj", "down_proj"]),
         "gpt2": (GPT2, public_gpt2, gpt2, ["c_attn", "c_fc"])}


@unittest.skipUnless(HAS_PEFT, "peft is not installed")
class Adapters(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)

    def train(self, name, model, more=""):
        (self.scratch / f"{name}.toml").write_text(RUN.format(name=name, model=model, more=more))
        bonfire(self.scratch, "train", f"{name}.toml", "--ranks", 2)
        return self.scratch / "runs" / name

    def model_over(self, make, public, folder):
        model = make()
        missing, unexpected = model.load_state_dict({n: t.contiguous() for n, t in public(parameters_of(newest(folder))).items()},
                                                    strict=False)
        self.assertEqual((list(unexpected), [n for n in missing if not n.endswith(("attn.bias", "masked_bias"))]), ([], []))
        return model

    def same(self, theirs, ours):
        theirs = theirs.state_dict()
        for name, values in ours.items():
            self.assertTrue(torch.allclose(theirs[name], values, rtol=1e-5, atol=1e-6), name)

    def test_ours_are_read_by_peft(self):
        from peft import PeftModel
        for kind, (model, public, make, names) in KINDS.items():
            with self.subTest(kind):
                base = self.train(kind, model)
                tuned = self.train(kind + "-tuned", model,
                                   f'[adapter]\nrank = 3\nalpha = 6\nmatch = {json.dumps(names)}\n'
                                   f'[checkpoint]\nweights = "{base}"\n')
                bonfire(self.scratch, "checkpoint", "adapter", tuned, kind + "-peft")
                bonfire(self.scratch, "checkpoint", "merge", tuned, kind + "-merged")
                adapted = PeftModel.from_pretrained(self.model_over(make, public, base), self.scratch / (kind + "-peft"))
                ours = public(parameters_of(self.scratch / (kind + "-merged")))
                self.assertFalse(torch.equal(ours[next(n for n in ours if names[0] in n)],
                                             public(parameters_of(newest(base)))[next(n for n in ours if names[0] in n)]))
                self.same(adapted.merge_and_unload(), ours)

    def test_peft_s_are_read_by_us(self):
        from peft import LoraConfig, get_peft_model
        for kind, (model, public, make, names) in KINDS.items():
            with self.subTest(kind):
                base = self.train(kind, model)
                adapted = get_peft_model(self.model_over(make, public, base),
                                         LoraConfig(r=4, lora_alpha=12, target_modules=names, fan_in_fan_out=kind == "gpt2",
                                                    init_lora_weights=False))
                adapted.save_pretrained(self.scratch / (kind + "-theirs"))
                bonfire(self.scratch, "checkpoint", "merge", kind + "-theirs", kind + "-merged", "--base", base)
                self.same(adapted.merge_and_unload(), public(parameters_of(self.scratch / (kind + "-merged"))))
                # And trained on.
                self.train(kind + "-more", model,
                           f'[adapter]\nrank = 4\nalpha = 12\nmatch = {json.dumps(names)}\n'
                           f'weights = "{self.scratch / (kind + "-theirs")}"\n[checkpoint]\nweights = "{base}"\n')


if __name__ == "__main__":
    unittest.main()
