"""x402 payments: signed payments in a header, which a facilitator settles.

Source: x402, protocol version 2, scheme ``exact``, HTTP transport (x402.org), and
exchanges recorded with the original coordinator.  The package ``x402`` is an extra:
import this module only where payments are configured.
"""

import asyncio
import base64
import json
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from typing import Any

import httpx
from x402 import (
    AssetAmount,
    PaymentPayload,
    PaymentRequired,
    PaymentRequirements,
    ResourceConfig,
    ResourceInfo,
    SchemeNotFoundError,
    x402ResourceServer,
)
from x402.http import (
    FacilitatorConfig,
    HTTPFacilitatorClient,
    decode_payment_signature_header,
    encode_payment_required_header,
    encode_payment_response_header,
)
from x402.interfaces import PaymentFlowConfig
from x402.schemas import Network, Price, SupportedKind

from shoal.domain.errors import ConfigError, PaymentDue, PaymentsDown
from shoal.gateway.jobs.payments import Charge, OfferedPayment, SettledPayment

REQUIRED = "PAYMENT-REQUIRED"
RESPONSE = "PAYMENT-RESPONSE"
SIGNATURE = "payment-signature"

EXACT = "exact"
MICROS = 6  # decimals of a micro-dollar
PAY_WITHIN = 300  # seconds that a payment is valid
FACILITATOR_TIMEOUT = 60.0  # seconds: settling waits for a chain
REFERENCE_MAX = 256  # characters
ERROR_MAX = 300  # characters of a facilitator's error

UNPAID = "Payment required"
UNREADABLE = "PAYMENT-SIGNATURE: expected an x402 version 2 payment, JSON in base64"
OTHER = "No matching payment requirements"
USED = "payment_already_used"

log = logging.getLogger("shoal.gateway")


@dataclass(frozen=True, slots=True)
class Seller:
    """The recipient of payments, its network and its asset.

    ``network`` is a CAIP-2 name, ``asset`` a token worth a dollar with ``decimals``,
    and ``extra`` what payers need to know about it: on EVM chains the ``name`` and
    ``version`` of its EIP-712 domain.
    """

    facilitator: str  # its URL
    pay_to: str
    network: str
    asset: str
    decimals: int = MICROS
    extra: Mapping[str, str] = field(default_factory=dict)

    def amount(self, price: int) -> str:
        """Return a price in micro-dollars as units of the asset, rounded up."""
        if self.decimals >= MICROS:
            return str(price * 10 ** (self.decimals - MICROS))
        return str(-(-price // 10 ** (MICROS - self.decimals)))


class _ExactScheme:
    """The scheme ``exact`` on any chain; the facilitator verifies payments."""

    scheme = EXACT
    default_asset_transfer_method = "default"
    payment_flows: Mapping[str, PaymentFlowConfig] = {
        "default": {"supported": ("authorization",), "default": "authorization"}
    }

    def parse_price(self, price: Price, network: Network) -> AssetAmount:
        assert isinstance(price, AssetAmount), f"a price in units, not {price}"
        return price

    def enhance_payment_requirements(
        self,
        requirements: PaymentRequirements,
        supported_kind: SupportedKind,
        extensions: list[str],
    ) -> PaymentRequirements:
        # On Solana the facilitator pays the network's fee, and payers must name it.
        if (payer := (supported_kind.extra or {}).get("feePayer")) is not None:
            requirements.extra["feePayer"] = payer
        return requirements


class X402Payments:
    """Collects x402 payments to a ``seller``.

    Fetches the facilitator's capabilities at the first payment, and again until it
    answers.  Close it when done.
    """

    def __init__(self, seller: Seller) -> None:
        self._seller = seller
        self._http = httpx.AsyncClient(
            timeout=FACILITATOR_TIMEOUT, follow_redirects=False, verify=_authorities()
        )
        config = FacilitatorConfig(
            seller.facilitator, FACILITATOR_TIMEOUT, http_client=self._http
        )
        self._server = x402ResourceServer(HTTPFacilitatorClient(config))
        self._server.register(seller.network, _ExactScheme())
        self._ready = False

    async def prepare(self) -> None:
        """Fetch the facilitator's capabilities, unless they are known.

        Raises PaymentsDown, or ConfigError if it does not support the seller's network.
        """
        if self._ready:
            return
        shown = self._seller.facilitator.partition("?")[0]  # the rest may be secret
        try:
            await asyncio.to_thread(self._server.initialize)
            self._requirements(0)
        except SchemeNotFoundError as error:
            raise ConfigError(
                f"the facilitator {shown} does not accept {EXACT} payments on "
                f"{self._seller.network}: choose another --x402-network or "
                "--x402-facilitator"
            ) from error
        except httpx.InvalidURL as error:
            raise ConfigError(f"--x402-facilitator {shown}: {error}") from error
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            raise _payments_down(error) from error
        self._ready = True

    async def verify(self, charge: Charge) -> OfferedPayment:
        try:
            await self.prepare()
        except ConfigError as error:
            # It names the facilitator, whose address clients need not know.
            log.error("payments cannot be checked: %s", error)
            raise _payments_down(
                ValueError("it does not accept such payments")
            ) from error
        requirements = self._requirements(charge.price)
        due = partial(self._due, charge, requirements)
        if (header := charge.headers.get(SIGNATURE)) is None:
            raise due(UNPAID)
        payload = _payload(header)
        if payload is None:
            raise due(UNREADABLE)
        if self._server.find_matching_requirements([requirements], payload) is None:
            raise due(OTHER)
        try:
            verified = await self._server.verify_payment(payload, requirements)
        except (httpx.HTTPError, ValueError) as error:
            raise _payments_down(error) from error
        if not verified.is_valid:
            raise due(verified.invalid_reason or "invalid payment")
        return OfferedPayment(
            partial(self._settle, charge, payload, requirements),
            signed_nonce(payload),
            due(USED),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _settle(
        self, charge: Charge, payload: PaymentPayload, requirements: PaymentRequirements
    ) -> SettledPayment:
        try:
            outcome = await self._server.settle_payment(payload, requirements)
        except (httpx.HTTPError, ValueError) as error:
            log.error(
                "whether a payment was settled is not known: %s", _error_text(error)
            )
            raise _payments_down(
                error, "; the payment may have gone through: check before paying again"
            ) from error
        headers = {RESPONSE: encode_payment_response_header(outcome)}
        reference = outcome.transaction[:REFERENCE_MAX]
        if not outcome.success or not reference:
            due = self._due(
                charge, requirements, outcome.error_reason or "settlement failed"
            )
            raise PaymentDue(str(due), due.headers | headers)
        return SettledPayment(reference, headers)

    def _requirements(self, price: int) -> PaymentRequirements:
        seller = self._seller
        config = ResourceConfig(
            scheme=EXACT,
            pay_to=seller.pay_to,
            price=AssetAmount(
                amount=seller.amount(price),
                asset=seller.asset,
                extra=dict(seller.extra),
            ),
            network=seller.network,
            max_timeout_seconds=PAY_WITHIN,
        )
        (requirements,) = self._server.build_payment_requirements(config)
        return requirements

    def _due(
        self, charge: Charge, requirements: PaymentRequirements, why: str
    ) -> PaymentDue:
        resource = ResourceInfo(
            url=charge.url, description=charge.description, mime_type="application/json"
        )
        required = PaymentRequired(error=why, resource=resource, accepts=[requirements])
        return PaymentDue(why, {REQUIRED: encode_payment_required_header(required)})


def _payments_down(error: Exception, more: str = "") -> PaymentsDown:
    return PaymentsDown(
        f"payments cannot be checked, the facilitator fails: {_error_text(error)}{more}"
    )


def _payload(header: str) -> PaymentPayload | None:
    """Decode a payment; None if it is invalid, or of another version."""
    try:
        payload: Any = decode_payment_signature_header(header)
    except (ValueError, AttributeError, RecursionError):
        return None
    return payload if isinstance(payload, PaymentPayload) else None


def signed_nonce(payload: PaymentPayload) -> str:
    """Return what is the same however a signed payment is written.

    On EVM chains that is the payer's nonce, and on Solana the message of the
    transaction, without the signatures: one of them is the facilitator's.
    """
    content = payload.payload
    match content:
        case {"authorization": {"from": str(payer), "nonce": str(nonce)}}:
            with suppress(ValueError):
                return f"nonce {payer.lower()!a} {int(nonce, 0)}"
        case {"transaction": str(transaction)}:
            with suppress(ValueError):
                data = base64.b64decode(transaction)
                # Fewer than 128 signatures of 64 bytes, after their number.
                signed = data[1 + 64 * data[0] :] if data else b""
                return f"message {sha256(signed).hexdigest()}"
        case _:
            pass
    written = json.dumps(content, sort_keys=True).encode()
    return f"payload {sha256(written).hexdigest()}"


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:ERROR_MAX]


@cache
def _authorities() -> ssl.SSLContext:
    """Return the context of facilitators' certificates, made once: it takes 50 ms."""
    return httpx.create_ssl_context()
