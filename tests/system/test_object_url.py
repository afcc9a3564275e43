"""URLs that options of paths were given are refused as URLs, not as files that are missing."""

from pathlib import Path

import pytest

from densefeed.storage.beton_verify import verify_files as verify_betons
from densefeed.storage.maintenance import verify_files as verify_maps
from densefeed.system.errors import UserError


@pytest.mark.parametrize("verify", [verify_maps, verify_betons])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://a/b", "https://a/b is not a URL of object storage; write s3://BUCKET/FOLDER"),
        ("https://a/\x1b[2Jb", r"https://a/\x1b[2Jb has control characters"),
        ("S3://a/b", "S3://a/b is not a URL of object storage"),
        ("file:///a/b", "file://a/b is not a URL of object storage"),
        ("s3://a/b", "s3://a/b is in object storage"),
    ],
)
def test_outside_urls_in_place_of_files_are_refused_as_urls(verify, text, said):
    with pytest.raises(UserError) as refused:
        verify((Path(text),))
    assert said in str(refused.value)


def test_outside_a_url_without_a_bucket_is_not_fetched():
    """A path of s3:///x is that of the bucket x."""
    for text, place in (("s3:///x", "s3://BUCKET/FOLDER"), ("s3://x/y", "s3://x/y")):
        with pytest.raises(UserError, match=f"score-maps fetch {place} maps`"):
            verify_maps((Path(text),))
