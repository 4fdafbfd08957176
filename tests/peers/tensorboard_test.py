"""TensorBoard's own reader opens our event files."""
import tempfile
import unittest

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from probe import probe


class TensorBoard(unittest.TestCase):
    def test_reads_every_scalar_at_its_step(self):
        with tempfile.TemporaryDirectory() as folder:
            probe("events", folder)
            events = EventAccumulator(folder)
            events.Reload()
            self.assertEqual(events.file_version, 2.0)
            self.assertEqual(set(events.Tags()["scalars"]), {"loss", "lr"})
            loss = events.Scalars("loss")
            self.assertEqual([event.step for event in loss], list(range(1, 101)))
            for event in loss:
                self.assertAlmostEqual(event.value, 8.0 / event.step, places=5)
            self.assertTrue(all(a.wall_time <= b.wall_time for a, b in zip(loss, loss[1:])))


if __name__ == "__main__":
    unittest.main()
