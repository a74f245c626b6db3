"""Encodes a worker's messages for Shoal's or an original coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, Raw, UnsetType

from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.worker import DeviceKind, MachineHealth
from shoal.protocols.dispatch.admission import CAPABILITIES, DEVICES
from shoal.protocols.dispatch.codec.answers import (
    completion_extension,
    encode_answer,
    error_output,
    output_of,
)
from shoal.protocols.dispatch.codec.ecmascript_json import to_json, well_formed
from shoal.protocols.dispatch.codec.extension import (
    AttemptExtension,
    CoordinatorAnnouncement,
    kinds_of,
    present,
    proof_message,
)
from shoal.protocols.dispatch.codec.messages import (
    REASON_MAX,
    Drain,
    JobReject,
    MachineMetrics,
    ProviderHeartbeat,
    ProviderType,
    RegisterProvider,
)
from shoal.protocols.dispatch.worker_jobs import RunningJob
from shoal.protocols.seam.context import Identity, WorkerProfile

TYPES: Mapping[DeviceKind, ProviderType] = {
    device: type_ for type_, device in DEVICES.items()
}


@dataclass(frozen=True, slots=True)
class WorkerEncoder:
    """Encodes the messages of ``profile`` for the coordinator that ``announced``."""

    profile: WorkerProfile
    announced: CoordinatorAnnouncement

    @property
    def identity(self) -> Identity:
        """The key that signs the worker's answers."""
        assert self.profile.identity is not None, "answers are signed on this wire"
        return self.profile.identity

    @property
    def extended(self) -> bool:
        return self.announced.known

    def registration(self) -> str:
        """Return ``register``; Shoal's coordinators also get a proof of the key."""
        profile = self.profile
        kinds = kinds_of(profile)
        shoal: Raw | UnsetType = UNSET
        if self.extended:
            challenge, coordinator = self.announced.challenge, self.announced.key
            key = self.identity.public_key
            proof = self.identity.sign(proof_message(challenge, coordinator, key))
            shoal = Raw(to_json(present(profile, proof)))
        return to_json(
            RegisterProvider(
                self.identity.public_key.hex(),
                TYPES[profile.device],
                [name for name, kind in CAPABILITIES.items() if kind in kinds],
                profile.price or UNSET,
                shoal=shoal,
            )
        )

    def heartbeat(self, health: MachineHealth | None) -> str:
        """Return a heartbeat, with the machine's health if it is known."""
        metrics: Raw | UnsetType = UNSET
        if health is not None:
            measured = MachineMetrics(health.cpu, health.memory, health.jobs)
            metrics = Raw(to_json(measured))
        return to_json(ProviderHeartbeat(self.identity.public_key.hex(), metrics))

    def draining(self, reason: str) -> str:
        """Return ``drain``, which only Shoal's coordinators understand."""
        return to_json(Drain(well_formed(reason[:REASON_MAX])))

    def completion(
        self, running: RunningJob, event: Completed | Rejected | Failed, now: float
    ) -> str:
        """Return the message that ends a job.

        Raises Unsupported if an original coordinator has no message for it.
        """
        match event:
            case Completed():
                try:
                    return self._completion(running, event, now)
                except PeerError as error:
                    return self.failure(running, str(error), Fault.WORKER, now)
            case Rejected(_, _, reason):
                if not self.extended:
                    raise Unsupported("an original coordinator would forget the job")
                return self._rejection(running, reason, AttemptExtension(running.lease))
            case Failed(_, _, error, fault):
                return self.failure(running, error, fault, now)

    def rejection(self, running: RunningJob, reason: str, now: float) -> str:
        """Return the message for a job that was not started."""
        if self.extended:
            return self._rejection(running, reason, AttemptExtension(running.lease))
        return self.failure(running, reason, Fault.REQUEST, now)

    def failure(
        self, running: RunningJob, reason: str, fault: Fault, now: float
    ) -> str:
        """Return the message for a job that ran and failed."""
        if self.extended:
            attempt = AttemptExtension(running.lease, failed=True, fault=fault.value)
            return self._rejection(running, reason, attempt)
        # As original workers do: a rejected job hangs forever at the coordinator.
        output = error_output(reason[:REASON_MAX])
        return encode_answer(running.wire_id, output, self.identity, self._at(now))

    def _completion(self, running: RunningJob, event: Completed, now: float) -> str:
        pieces = [*running.pieces, *event.rest]
        outcome = assemble(pieces, event.finish_reason, event.usage)
        output = output_of(running.kind, self.profile.model.name, outcome)
        ending = None
        if self.extended:
            ending = completion_extension(running.lease, event.finish_reason, outcome)
        return encode_answer(
            running.wire_id, output, self.identity, self._at(now), ending
        )

    def _rejection(
        self, running: RunningJob, reason: str, attempt: AttemptExtension
    ) -> str:
        reason = well_formed(reason[:REASON_MAX])
        return to_json(JobReject(running.wire_id, reason, Raw(to_json(attempt))))

    def _at(self, now: float) -> float:
        return now + self.profile.epoch
