from shoal.domain.receipts import Verdict


def test_every_verdict_is_a_sentence_of_its_own() -> None:
    sentences = [verdict.value for verdict in Verdict]

    assert len(set(sentences)) == len(Verdict) == 8
    assert all(" " in sentence for sentence in sentences)
