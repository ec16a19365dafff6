//! Formats numbers and short phrases for the tables.

/// Formats a value with a number of decimals; an unknown value is "-".
pub(crate) fn known(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// Describes the number of nodes and the replication factor.
pub(crate) fn replication_text(nodes: usize, replication: u32) -> String {
    let plural = if nodes == 1 { "" } else { "s" };
    format!("{nodes} node{plural}, replication {replication}")
}

/// Groups thousands with commas. Fractions below 100 keep one decimal.
pub(crate) fn grouped(value: f64) -> String {
    if value < 100.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a number of bytes with a binary unit where it is a whole number of that unit.
pub(crate) fn bytes_text(bytes: usize) -> String {
    for (unit, size) in [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= size && bytes.is_multiple_of(size) {
            return format!("{} {unit}", bytes / size);
        }
    }
    format!("{bytes} B")
}

/// Escapes text for HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_binary_units() {
        for (bytes, text) in
            [(0, "0 B"), (1400, "1400 B"), (16 << 10, "16 KiB"), (1 << 20, "1 MiB")]
        {
            assert_eq!(bytes_text(bytes), text);
        }
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(0.0), "0");
        assert_eq!(grouped(12.34), "12.3");
        assert_eq!(grouped(999.6), "1,000");
        assert_eq!(grouped(1_234_567.8), "1,234,568");
    }

    #[test]
    fn replication_is_shown_with_the_node_count() {
        assert_eq!(replication_text(1, 1), "1 node, replication 1");
        assert_eq!(replication_text(5, 3), "5 nodes, replication 3");
    }

    #[test]
    fn unknown_values_show_a_dash() {
        assert_eq!((known(None, 2), known(Some(1.234), 2)), ("-".to_owned(), "1.23".to_owned()));
    }
}
