"""The loop: epochs of steps, with evaluation, checkpoints and records; for one process or many."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import save
from tensor_dropout.layers.dropout import find_dropouts
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.theta_schedule import ThetaSchedule
from tensor_dropout.metrics.registry import main_metric
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.base import Data, StreamSplit
from tensor_dropout_lab.locks import lock_folder
from tensor_dropout_lab.nets import Network, build_net, load_backbone, rescale_
from tensor_dropout_lab.network_loading import read_state
from tensor_dropout_lab.training.baselines import score_baselines
from tensor_dropout_lab.training.checkpoint import read_latest, write_checkpoint
from tensor_dropout_lab.training.config import Config
from tensor_dropout_lab.training.evaluation import (
    Outcome,
    choose_evaluation_batch,
    evaluate,
    summarize_outputs,
    warn_not_finite,
)
from tensor_dropout_lab.training.execution import choose_dtype, choose_memory_format, choose_speed, lay_out_
from tensor_dropout_lab.training.optimizers import make_optimizer
from tensor_dropout_lab.training.processes import Process, describe_device, joined, seed_process, wrap_network
from tensor_dropout_lab.training.run_context import Interruption, explaining_memory, threads, tuned_convolutions
from tensor_dropout_lab.training.runs import RunFolder, describe_head, splits
from tensor_dropout_lab.training.sampling import Feed, Sampler
from tensor_dropout_lab.training.schedule import rate_at
from tensor_dropout_lab.training.show import Board, Reporter
from tensor_dropout_lab.training.state import (
    gather_network,
    gather_state,
    generator_states,
    restore_state,
    set_generator_states,
)
from tensor_dropout_lab.training.step import Step, check_task, find_radius, make_task_loss


def train(config: Config, folder: Path, *, show: bool = True) -> dict[str, Any]:
    """Train a network as the config says, in a folder; a run that was cut off goes on.

    Args:
        config: from ``resolve_config``.
        folder: for everything that is kept.
        show: a progress bar, or a line per epoch where nobody watches a terminal.

    Returns:
        The result, as in ``result.json``.

    Raises:
        TensorDropoutError: if the config does not fit the data, the loss is not finite, or memory or disk are full.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the state is saved.
    """
    run = RunFolder(folder)
    with joined(config.run.device) as process, threads(config.run.threads), tuned_convolutions():
        data = load_data(config.data.name, root=config.data.root, seed=config.data.seed, **config.data.options)
        network = build_network(config, data)  # an impossible head is said before a folder is made
        sampler = Sampler(len(data.train), config.run.batch, 0, process.rank, process.world)
        choose_speed(config, data, process.device, process.world, sampler.steps_per_epoch)
        check_task(config, data)
        find_radius(config, data)
        with lock_folder(folder) if process.is_first else nullcontext():
            if process.is_first:
                if run.result() is None:
                    check_held_out(data)
                run.open(config, data, describe_head(config, network))
                run.clean()
            process.wait()
            done = run.result()
            if done is not None:
                return done
            with explaining_memory(config):
                reporter = Reporter(config, data, show and process.is_first)
                return Trainer(config, data, network, run, process, reporter).run()


def build_network(config: Config, data: Data) -> Network:
    """The network of a config for a data set, initialised by the run's seed; equal on every process."""
    settings = config.net.settings()
    name, weights = settings.pop("name"), settings.pop("weights", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        network = build_net(name, outputs=data.outputs, input_shape=data.input_shape, **settings)
    if weights is not None:
        load_backbone(network, read_state(weights))
    return network.double() if config.run.precision == "float64" else network


def check_held_out(data: Data) -> None:
    """Find examples to validate or test on that cannot be read before anything is trained, not after all of it.

    They are read at every start of a run that is not done. At 2 ms of a core each, ImageNet's 50,000 pictures take
    100 s over the number of cores; an epoch over its training pictures, which are not read in advance, 25 times that.

    Raises:
        TensorDropoutError: if one cannot be read, or is not finite.
    """
    for name, part in {"validation": data.validation, "test": data.test}.items():
        if isinstance(part, StreamSplit):
            part.check()
        elif part is not None and part.inputs.is_floating_point():
            for example, x in zip(part.names, part.inputs, strict=True):
                if not bool(torch.isfinite(x).all()):
                    raise TensorDropoutError(
                        f"train: the input of {example!r} in the {name} part is not finite; mend it, or leave it out"
                    )


class Trainer:
    """One run of a network on a data set.

    Args:
        config: how.
        data: on what.
        network: any module from prepared inputs to outputs.
        run: where records and checkpoints go.
        process: this process among all.
        reporter: who shows progress.
    """

    def __init__(
        self, config: Config, data: Data, network: nn.Module, run: RunFolder, process: Process, reporter: Reporter
    ) -> None:
        self.config, self.data, self.folder, self.process, self.reporter = config, data, run, process, reporter
        device = process.device
        self.dtype = choose_dtype(config, device)
        self.plain = lay_out_(network.to(device), choose_memory_format(config, data)).train()
        self.network = wrap_network(self.plain, config, process)
        self.optimizer = make_optimizer(self.plain, config.optimizer, device)
        self.sampler = Sampler(len(data.train), config.run.batch, config.run.seed, process.rank, process.world)
        feed = Feed(data.train, self.sampler, device, config.run.workers)
        self.feed = feed
        self.task_loss = make_task_loss(data, config).to(device)
        self.steps = config.run.epochs * self.sampler.steps_per_epoch
        self.speed = choose_speed(config, data, device, process.world, self.steps * config.run.batch)
        self.step = Step(self.network, self.optimizer, feed.fetch, data, self.task_loss, config, device, self.speed)
        self.theta = schedule_theta(self.plain, config)
        self.board = Board(run.path / "tensorboard" if config.run.tensorboard and process.is_first else None)
        self.done = 0
        self.seconds = 0.0
        self.saved_at = time.monotonic()
        seed_process(config.run.seed, process)

    def run(self) -> dict[str, Any]:
        """Train to the end, evaluate, and write model and result."""
        self.fit()
        return self.finish()

    def fit(self) -> None:
        """Train from where the last checkpoint left off to the end."""
        self.resume()
        per_epoch = self.sampler.steps_per_epoch
        with Interruption() as interruption, self.reporter.showing(self.done, self.steps):
            while self.done < self.steps:
                epoch, first = divmod(self.done, per_epoch)
                self.run_epoch(epoch, first, interruption)
                self.finish_epoch(epoch)
                final = self.done == self.steps
                stop = not final and self.any_asked(interruption)
                if stop or final or (epoch + 1) % self.config.run.checkpoint_epochs == 0:
                    self.save()
                if stop:
                    raise KeyboardInterrupt

    def run_epoch(self, epoch: int, first: int, interruption: Interruption) -> None:
        """The steps of one epoch, from its step ``first`` on."""
        started = time.monotonic()
        per_epoch = self.sampler.steps_per_epoch
        self.set_theta(epoch)
        for start in self.feed.starts(epoch, first):
            self.step.set_rate(rate_at(self.config.schedule, self.done, self.steps, per_epoch))
            self.step(*start)
            self.done += 1
            if self.process.device.type == "cpu":
                self.check_finite()
            self.reporter.advance(self.show_sums if self.process.world == 1 else None)
            last = self.done % per_epoch == 0
            if last:  # the end of an epoch is saved after its metrics
                break
            often = self.process.world == 1 or self.done % 10 == 0  # asking all processes takes a while
            stop = often and self.any_asked(interruption)
            if stop or self.checkpoint_is_due():
                self.seconds += time.monotonic() - started
                started = time.monotonic()
                self.save()
            if stop:
                raise KeyboardInterrupt
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.monotonic() - started

    def set_theta(self, epoch: int) -> None:
        """θ as scheduled for an epoch."""
        if self.theta is not None:
            self.theta.load_state_dict({**self.theta.state_dict(), "last_step": epoch})

    def any_asked(self, interruption: Interruption) -> bool:
        """Whether any process was asked to stop: all of them save and stop after the same step."""
        return any(self.process.gather(interruption.asked))

    def checkpoint_is_due(self) -> bool:
        """By steps, or, with one process, by the clock."""
        every, seconds = self.config.run.checkpoint_every, self.config.run.checkpoint_seconds
        if every is not None and self.done % every == 0:
            return True
        return self.process.world == 1 and seconds > 0 and time.monotonic() - self.saved_at > seconds

    def check_finite(self) -> None:
        """Stop at once when the loss is no longer a number; the last checkpoint is from before."""
        if not bool(torch.isfinite(self.step.sums).all()):
            raise self.not_finite("the loss is")

    def not_finite(self, what: str) -> TensorDropoutError:
        """The error for numbers that are not finite."""
        other = ", or run.precision=float32" if self.dtype == torch.bfloat16 else ""
        return TensorDropoutError(
            f"train: {what} not finite at step {self.done} of {self.steps}; the last checkpoint in "
            f"{self.folder.path} is from before it: lower optimizer.lr, or set optimizer.clip{other}"
        )

    def show_sums(self) -> tuple[float, float]:
        """Mean loss and mean count of the epoch so far, for display; the device is asked."""
        self.check_finite()
        steps = self.done % self.sampler.steps_per_epoch or self.sampler.steps_per_epoch
        loss, counted = self.step.sums.tolist()
        return loss / steps, counted / (steps * self.config.run.batch / self.process.world)

    def finish_epoch(self, epoch: int) -> None:
        """Metrics of the epoch, and evaluation if it is due."""
        self.check_finite()
        per_epoch = self.sampler.steps_per_epoch
        sums = self.process.gather(self.step.sums.tolist())
        loss = sum(each[0] for each in sums) / len(sums) / per_epoch
        counted = sum(each[1] for each in sums) / (per_epoch * self.config.run.batch)
        self.step.sums.zero_()
        metric = main_metric(self.data.task)
        line = {
            "epoch": epoch + 1,
            "loss": loss,
            metric.name: metric.scale * counted,
            "lr": self.optimizer.param_groups[0]["initial_lr"]
            * rate_at(self.config.schedule, self.done - 1, self.steps, per_epoch),
            **({} if self.theta is None else {"theta": round(self.theta.theta, 6)}),
            "seconds": round(self.seconds, 3),
        }
        final = self.done == self.steps
        if self.data.validation is not None and (final or (epoch + 1) % self.config.run.evaluate_every == 0):
            line["validation"] = self.summarize(self.evaluate("validation"))
        if self.process.is_first:
            self.folder.note(line)
            self.board.note(line)
        self.reporter.finish_epoch(line)

    def evaluate(self, part: str, uncertainty: bool = False, network: nn.Module | None = None) -> Outcome:
        """Outputs on a part of the data, of the averaged weights if there is an average.

        The network that is kept answers in single precision, as it will in use; bfloat16 has no age from 70 to 70.5.
        """
        target = self.averaged() if network is None else network
        dtype = self.dtype if network is None else torch.promote_types(self.dtype, torch.float32)
        return evaluate(
            target,
            self.data,
            splits(self.data)[part],
            device=self.process.device,
            dtype=dtype,
            batch=choose_evaluation_batch(self.config.run.batch, self.data.input_shape),
            workers=self.config.run.workers,
            mean=self.task_loss.mean if network is None else None,
            std=self.task_loss.std if network is None else None,
            uncertainty=uncertainty,
        )

    def summarize(self, outcome: Outcome) -> dict[str, Any]:
        """The numbers of an outcome, with the names of the data's targets."""
        names = self.data.target_names if self.data.task == "regression" else ()
        return summarize_outputs(outcome, self.data.task, names, self.data.points)

    def averaged(self) -> nn.Module:
        """The network as it is evaluated."""
        if self.step.average is None:
            return self.plain
        averaged = copy.deepcopy(self.plain)
        averaged.load_state_dict(self.step.average.state)
        for dropout, own in zip(find_dropouts(averaged), find_dropouts(self.plain), strict=True):
            dropout.theta = own.theta  # a setting, not learned: the average of a schedule is none of its values
        return averaged

    # Checkpoints.

    def save(self) -> None:
        """Write a checkpoint: everything needed to go on, bit for bit on a CPU."""
        self.check_finite()
        model, optimizer = gather_state(self.plain, self.optimizer, self.config, self.process)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in model.values() if tensor.is_floating_point()):
            raise self.not_finite("the weights are")
        generators = self.process.gather(generator_states(self.process.device))
        sums = self.process.gather(self.step.sums.tolist())
        if self.process.is_first:
            average = self.step.average
            state = {
                "model": model,
                "optimizer": optimizer,
                "average": None if average is None else {**average.state, "": average.updates},
                "generators": generators,
                "sums": sums,
                "seconds": self.seconds,
            }
            write_checkpoint(self.folder.path, self.done, state)
        self.saved_at = time.monotonic()

    def resume(self) -> None:
        """Go on from the latest whole checkpoint, if there is one."""
        state = self.process.share(read_latest(self.folder.path) if self.process.is_first else None)
        if state is None:
            if self.process.is_first:
                self.folder.rewind(0)
            return
        self.done, self.seconds = state["step"], state["seconds"]
        restore_state(self.plain, self.optimizer, state)
        if self.step.average is not None and state["average"] is not None:
            self.step.average.updates.copy_(state["average"].pop(""))
            for name, tensor in state["average"].items():
                self.step.average.state[name].copy_(tensor)
        sums = torch.tensor(state["sums"], dtype=torch.float64)  # (processes, 2)
        if len(sums) == self.process.world:
            set_generator_states(state["generators"][self.process.rank], self.process.device)
            self.step.sums.copy_(sums[self.process.rank])
        else:  # other processes than before: equal shares of what was summed up
            self.step.sums.copy_(torch.stack([sums[:, 0].mean(), sums[:, 1].sum() / self.process.world]))
        if self.process.is_first:
            self.folder.rewind(self.done // self.sampler.steps_per_epoch)

    # The end.

    def finished_network(self) -> nn.Module:
        """A whole copy of the trained network; that of a regression answers in the target's unit."""
        self.set_theta(self.config.run.epochs)
        network = copy.deepcopy(gather_network(self.averaged()))
        if self.data.task == "regression":
            rescale_(network, self.task_loss.std, self.task_loss.mean)
        return network

    def finish(self) -> dict[str, Any]:
        """Evaluate the trained network, on the test part this once, and write model and result."""
        network = self.finished_network()
        head = network.head if isinstance(network, Network) else network
        result: dict[str, Any] = {
            "task": self.data.task,
            "target": self.data.target,
            **({"points": self.data.point_names} if self.data.points else {}),
            "classes": self.data.classes,
            "epochs": self.config.run.epochs,
            "steps": self.steps,
            "parameters": count_parameters(network),
            "head_parameters": count_parameters(head),
            "compression_ratio": getattr(head, "compression_ratio", None),
            "seconds": round(self.seconds, 3),
            "examples_per_second": round(self.steps * self.config.run.batch / max(self.seconds, 1e-9), 1),
            "processes": self.process.world,
            "device": describe_device(self.process.device),
            "precision": str(self.dtype).removeprefix("torch."),
            "speed": self.speed,
        }
        for part in ("validation", "test"):
            if part in splits(self.data):
                outcome = self.evaluate(part, uncertainty=part == "test", network=network)
                result[part] = self.summarize(outcome)
                if self.process.is_first:
                    warn_not_finite(part, splits(self.data)[part].names, outcome.outputs)
        self.board.close()
        if self.process.is_first:
            ridge = None
            if self.data.task == "regression" and self.data.test is not None:
                result["baselines"], ridge = score_baselines(self.data, self.task_loss.mean.cpu())
            last = "test" if "test" in result else "validation"
            if last in result:
                self.folder.write_predictions(outcome, splits(self.data)[last], self.data, ridge)
            save(network.cpu(), self.folder.model_path)
            self.folder.finish(result)
        self.process.wait()
        return result


def schedule_theta(network: nn.Module, config: Config) -> ThetaSchedule | None:
    """θ over the epochs, from ``schedule.theta_start`` to the network's own; None: it stays."""
    start, share = config.schedule.theta_start, config.schedule.theta_share
    if start is None:
        return None
    end = float(find_dropouts(network)[0].theta)
    return ThetaSchedule(network, start=start, end=end, steps=max(1, round(share * config.run.epochs)))
