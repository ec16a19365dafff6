//! Pages of a group's members, partitions and offsets, bounded in rows and in bytes.

use std::sync::Arc;

use super::page::page_size;
use super::reserve_response;
use crate::call::CallMemory;
use crate::error::{Error, Result};
use crate::limits::{GROUP_PAGE_BYTES_MAX, GROUP_ROWS_PER_PAGE_MAX};
use crate::log::PartitionKey;

/// Key of a row, in the order of the rows. The token of a page names the last row before it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GroupRowKey {
    Member(Arc<str>),
    Partition(PartitionKey),
}

impl GroupRowKey {
    pub(super) fn partition(&self) -> Option<PartitionKey> {
        match self {
            Self::Partition(key) => Some(*key),
            Self::Member(_) => None,
        }
    }

    fn token(&self) -> String {
        match self {
            Self::Member(id) => format!("m{id}"),
            Self::Partition(PartitionKey { topic_id, number }) => format!("p{topic_id}/{number}"),
        }
    }

    fn parse(token: &str) -> Option<Self> {
        if let Some(id) = token.strip_prefix('m') {
            return Some(Self::Member(id.into()));
        }
        let (topic_id, number) = token.strip_prefix('p')?.split_once('/')?;
        let (topic_id, number) = (topic_id.parse().ok()?, number.parse().ok()?);
        Some(Self::Partition(PartitionKey { topic_id, number }))
    }
}

/// Bounds of a requested page.
#[derive(Debug)]
pub(super) struct GroupPageRequest {
    rows_max: usize,
    after: Option<GroupRowKey>,
}

/// Rows of a page.
#[derive(Debug, Default)]
pub(super) struct GroupPage {
    pub(super) rows: Vec<GroupRowKey>,
    /// Encoded size of the rows, at most.
    bytes: usize,
    /// Token of the next page; empty on the last page.
    pub(super) next_page_token: String,
}

impl GroupPageRequest {
    /// Parses the size and the token of a requested page.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the size is negative, or if the token is not from a response.
    pub(super) fn parse(size: i32, token: &str) -> Result<Self> {
        let rows_max = page_size(size, GROUP_ROWS_PER_PAGE_MAX, GROUP_ROWS_PER_PAGE_MAX)?;
        if token.is_empty() {
            return Ok(Self { rows_max, after: None });
        }
        let invalid = || Error::InvalidArgument {
            field: "page_token",
            what: format!("{token:?} is not the token of a page of this call"),
        };
        Ok(Self { rows_max, after: Some(GroupRowKey::parse(token).ok_or_else(invalid)?) })
    }

    /// Returns the page of these rows, which are in order. `row_bytes` is the encoded size of a
    /// row, at most.
    pub(super) fn cut(
        &self,
        rows: impl Iterator<Item = GroupRowKey>,
        row_bytes: impl Fn(&GroupRowKey) -> usize,
    ) -> GroupPage {
        let mut page = GroupPage::default();
        for key in rows.filter(|key| self.after.as_ref() < Some(key)) {
            let bytes = page.bytes + row_bytes(&key);
            if let Some(last) = page.rows.last()
                && (page.rows.len() == self.rows_max || bytes > GROUP_PAGE_BYTES_MAX)
            {
                page.next_page_token = last.token();
                break;
            }
            page.bytes = bytes;
            page.rows.push(key);
        }
        page
    }
}

impl GroupPage {
    /// Acquires the permit for the rows and their encoded form.
    ///
    /// # Errors
    /// As [`reserve_response`].
    pub(super) async fn reserve(&self, call: Option<&CallMemory>) -> Result<()> {
        reserve_response(call, 2 * self.bytes).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> impl Iterator<Item = GroupRowKey> {
        let members = ["a", "b"].map(|id| GroupRowKey::Member(id.into()));
        let keys = [(1, 0), (1, 9), (1, 10), (2, 0)];
        let partitions = keys.map(|(topic_id, number)| PartitionKey { topic_id, number });
        members.into_iter().chain(partitions.map(GroupRowKey::Partition))
    }

    #[test]
    fn pages_have_every_row_once() {
        for (size, row_bytes, page_rows) in [
            (0, 1, 6),
            (1, 1, 1),
            (4, 1, 4),
            (i32::MAX, GROUP_PAGE_BYTES_MAX / 2, 2),
            (0, GROUP_PAGE_BYTES_MAX + 1, 1),
        ] {
            let (mut found, mut token) = (Vec::new(), String::new());
            loop {
                let request = GroupPageRequest::parse(size, &token).unwrap();
                let page = request.cut(rows(), |_| row_bytes);
                assert!((1..=page_rows).contains(&page.rows.len()), "{page:?}");
                found.extend(page.rows);
                token = page.next_page_token;
                if token.is_empty() {
                    break;
                }
                assert_eq!(found.len() % page_rows, 0, "only the last page is shorter");
            }
            assert_eq!(found, rows().collect::<Vec<_>>());
        }
    }

    #[test]
    fn other_tokens_are_refused() {
        for token in ["x", "p", "p1", "p1/", "p/1", "p1/-1", "p1/4294967296", "\u{e9}"] {
            assert!(GroupPageRequest::parse(0, token).is_err(), "{token}");
        }
        assert!(GroupPageRequest::parse(-1, "").is_err());
    }
}
