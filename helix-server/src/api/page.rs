//! Pages of listings. The token of a page is the key of the last row of the page before it.

use crate::error::{Error, Result};

/// Returns the rows of a page: `default` if the request states none, and at most `max`.
///
/// # Errors
/// `INVALID_ARGUMENT` if it is negative.
pub(super) fn page_size(requested: i32, default: usize, max: usize) -> Result<usize> {
    match usize::try_from(requested) {
        Ok(0) => Ok(default),
        Ok(page_size) => Ok(page_size.min(max)),
        Err(_) => Err(Error::InvalidArgument {
            field: "page_size",
            what: "must not be negative".to_owned(),
        }),
    }
}

/// Cuts `rows` to a page of `size`. Returns the token of the next page, empty at the end.
pub(super) fn cut_page<T>(
    rows: &mut Vec<T>,
    size: usize,
    key: impl FnOnce(&T) -> String,
) -> String {
    let has_more = rows.len() > size;
    rows.truncate(size);
    rows.last().filter(|_| has_more).map(key).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_names_the_last_row_of_a_full_page() {
        let mut rows = vec!["a", "b", "c"];
        assert_eq!(cut_page(&mut rows, 2, |row| (*row).to_owned()), "b");
        assert_eq!(rows, ["a", "b"]);
        assert_eq!(cut_page(&mut rows, 2, |row| (*row).to_owned()), "", "no row is left");
        assert_eq!(cut_page(&mut Vec::<&str>::new(), 2, |row| (*row).to_owned()), "");
    }

    #[test]
    fn page_size_is_limited() {
        assert_eq!(page_size(0, 10, 100).unwrap(), 10);
        assert_eq!(page_size(7, 10, 100).unwrap(), 7);
        assert_eq!(page_size(1000, 10, 100).unwrap(), 100);
        assert!(page_size(-1, 10, 100).is_err());
    }
}
