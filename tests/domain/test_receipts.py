from shoal.domain.receipts import Verdict


def test_every_verdict_has_its_own_text() -> None:
    sentences = [verdict.value for verdict in Verdict]

    assert len(set(sentences)) == len(Verdict) == 8
    assert all(" " in sentence for sentence in sentences)
