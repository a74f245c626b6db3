"""The messages that copy models in one session; on some links, their refusal."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.seam.session import Data, Output, Send
from shoal.protocols.tealenet.codec.extension import ShoalFeature, read_raw_chunk
from shoal.protocols.tealenet.codec.messages import ModelTransferChunk
from shoal.protocols.tealenet.codec.model_sharing import (
    MODEL_MESSAGES,
    ModelSharingMessage,
    encode_model_message,
    read_model_message,
    wire_message,
)
from shoal.protocols.tealenet.link_profile import LinkProfile
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import TealePeer


class ModelExchange:
    """Reads and writes the model messages of one session.

    ``accepts``: the types of messages that can be sent.  ``expects_raw``: the next
    message is the bytes of a chunk, for ``receive_raw``.
    """

    def __init__(self, profile: LinkProfile, form: PayloadForm) -> None:
        self.accepts = MODEL_MESSAGES if profile.shares_models else frozenset[type]()
        self._allowed = profile.shares_models
        self._form = form
        self._head: ModelChunk | None = None  # of a raw chunk
        self._size = 0
        self.expects_raw = False

    def receive(
        self, message: ModelSharingMessage, peer: TealePeer
    ) -> Sequence[ModelMessage | Send]:
        """Return a message's meaning; nothing if the bytes of its chunk follow.

        On a link that shares no models, a query or a request gets the answer that the
        model is not available: the peer would wait for another one.
        """
        meaning = read_model_message(message)
        if not self._allowed:
            return self._decline(meaning)
        if peer.runs_shoal and isinstance(message, ModelTransferChunk):
            announced = read_raw_chunk(message.shoal)
            if announced is not None and isinstance(meaning, ModelChunk):
                self._head, self._size = meaning, announced.raw
                self.expects_raw = True
                return ()
        return (meaning,) if self._permits(peer) else ()

    def receive_raw(self, data: Data, peer: TealePeer) -> Sequence[ModelMessage]:
        """Return the announced chunk.  Raises PeerError for a wrong size."""
        head, self._head, self.expects_raw = self._head, None, False
        assert head is not None, "a message announced it"
        if isinstance(data, str) or len(data) != self._size:
            raise PeerError(
                f"{head.file_name}: expected {self._size} raw bytes, got {len(data)}"
            )
        return (replace(head, data=data),) if self._permits(peer) else ()

    def send(self, message: ModelMessage, peer: TealePeer) -> Sequence[Output]:
        """Encode a message.  Raises Unsupported on a link that shares no models."""
        if not self._allowed:
            raise Unsupported("models are shared on local networks only")
        raw = ShoalFeature.RAW in peer.features
        encoded = encode_model_message(message, raw=raw, flat=self._form.flat)
        return [Send(each) for each in encoded]

    def _decline(self, message: ModelMessage) -> Sequence[Send]:
        if not isinstance(message, ModelQuery | ModelRequest):
            return ()
        answer = wire_message(ModelAnswer(message.model, available=False))
        return (Send(self._form.encode(answer)),)

    def _permits(self, peer: TealePeer) -> bool:
        return self._allowed and not peer.refusal
