"""Our llama and gpt2 are the functions that transformers knows by those names: same weights, same logits, loss, gradients."""
import tempfile
import unittest

import torch

from probe import probe
from published import Written


class Transformers(unittest.TestCase):
    def check(self, name):
        with tempfile.TemporaryDirectory() as folder:
            probe("model", name, folder)
            written = Written(folder)
            model = written.build(name, torch.float64).eval()

            tokens = written.read("input", (2, 32)).long()
            target = written.read("target", (2, 32)).long()
            logits = model(tokens).logits
            ours = written.read("logits", (2, 32, written.index["vocab"]))
            self.assertGreater(ours.std().item(), 1e-3)
            self.assertLess((logits - ours).abs().max().item(), 1e-6 * ours.abs().max().item())
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            self.assertAlmostEqual(loss.item(), written.index["loss"], delta=1e-6 * loss.item())
            loss.backward()
            norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt().item()
            self.assertAlmostEqual(norm, written.index["gradient_norm"], delta=1e-5 * norm)

    def test_llama(self):
        self.check("llama")

    def test_llama_with_a_tied_head(self):
        self.check("llama-tied")

    def test_gpt2(self):
        self.check("gpt2")


if __name__ == "__main__":
    unittest.main()
