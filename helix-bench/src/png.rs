//! PNG pictures of charts, drawn with a font of this machine.

use anyhow::{Context, Result};
use resvg::{tiny_skia, usvg};

/// Pixels for each unit of a chart, so that text is sharp.
const SCALE: f32 = 2.0;

/// Fonts in order of preference; the first installed font is used.
const FAMILIES: [&str; 4] = ["DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial"];

/// Draws charts with the fonts of this machine, which are searched once.
pub(crate) struct PngRenderer(usvg::Options<'static>);

impl PngRenderer {
    /// Finds a font.
    ///
    /// # Errors
    /// None of the known fonts is installed.
    pub(crate) fn new() -> Result<Self> {
        let mut options = usvg::Options::default();
        let fonts = options.fontdb_mut();
        fonts.load_system_fonts();
        let is_installed = |family: &&str| {
            fonts.faces().any(|face| face.families.iter().any(|(name, _)| name == family))
        };
        let family = FAMILIES.into_iter().find(is_installed).with_context(|| {
            format!(
                "PNG needs one of the fonts {}; install fonts-dejavu-core, or use the SVG",
                FAMILIES.join(", ")
            )
        })?;
        fonts.set_sans_serif_family(family);
        Ok(Self(options))
    }

    /// Returns the PNG of an SVG document.
    ///
    /// # Errors
    /// The document is not valid, or too large.
    pub(crate) fn render(&self, svg: &str) -> Result<Vec<u8>> {
        let tree = usvg::Tree::from_str(svg, &self.0).context("parse the chart")?;
        let pixels = |length: f32| (length * SCALE).ceil() as u32;
        let (width, height) = (pixels(tree.size().width()), pixels(tree.size().height()));
        let picture = tiny_skia::Pixmap::new(width, height);
        let mut picture =
            picture.with_context(|| format!("a picture of {width} x {height} is too large"))?;
        let transform = tiny_skia::Transform::from_scale(SCALE, SCALE);
        resvg::render(&tree, transform, &mut picture.as_mut());
        picture.encode_png().context("encode the picture")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_lines_are_drawn() {
        let Ok(renderer) = PngRenderer::new() else {
            eprintln!("SKIPPED: no known font is installed");
            return;
        };
        let svg = |content: &str| {
            format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"80\" height=\"40\" \
                 font-family=\"sans-serif\">{content}</svg>"
            )
        };
        let [empty, text] = ["", "<text x=\"4\" y=\"20\">p99</text>"]
            .map(|content| renderer.render(&svg(content)).unwrap());
        assert!(empty.starts_with(b"\x89PNG") && text.len() > empty.len());
        assert!(renderer.render("no picture").is_err());
    }
}
