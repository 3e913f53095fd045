"""Draws compare's picture with gnuplot: four panels, one bar per variant, values above the bars."""

import math
import subprocess

COLOURS = {"tcp": "#8795a8", "shm": "#d1495b", "rdma": "#2f7f79", "rspreload": "#e0a030", "verbs": "#5b5ea6"}


class Panel:
    def __init__(self, title, unit, logarithmic, categories):
        self.title = title
        self.unit = unit
        self.logarithmic = logarithmic
        self.categories = categories  # [(label, {variant: value or None})]


def _label(value):
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.0f}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _values(panel):
    return [v for _, by_name in panel.categories for v in by_name.values() if v]


def _smallest(panel):
    return min(_values(panel), default=0)


def _axis(panel):
    values = _values(panel)
    if not values:
        return "unset logscale y; set yrange [0:1]"
    if panel.logarithmic:
        low = 10 ** math.floor(math.log10(min(values) / 1.5))
        return f"set logscale y; set yrange [{low}:{max(values) * 5}]"
    return f"unset logscale y; set yrange [0:{max(values) * 1.2}]"


def _panel_lines(index, panel, variants):
    width = 0.8 / len(variants)
    lines = [f"$panel{index} << EOD"]
    for name_index, name in enumerate(variants):
        for position, (_, by_name) in enumerate(panel.categories):
            value = by_name.get(name)
            if value:
                x = position + (name_index - (len(variants) - 1) / 2) * width
                lines.append(f'{x:.4f} {value:.6g} "{_label(value)}" {name_index}')
    lines.append("EOD")
    ticks = ", ".join(f'"{label}" {i}' for i, (label, _) in enumerate(panel.categories))
    lines += [
        f'set title "{panel.title}" font ",12"',
        f'set ylabel "{panel.unit}"',
        _axis(panel),
        # 10k and 1M rather than 10000 and 1x10^6; but no "m" for thousandths.
        'set format y "%.0s%c"' if _smallest(panel) >= 10 else 'set format y "%g"',
        f"set xtics ({ticks}) nomirror scale 0",
        f"set xrange [-0.6:{len(panel.categories) - 0.4}]",
        f"set boxwidth {width * 0.92:.4f}",
    ]
    boxes = ", ".join(
        f'$panel{index} using ($4=={i}?$1:1/0):2 with boxes lc rgb "{COLOURS.get(name, "#555555")}"'
        f' title "{name}"'
        for i, name in enumerate(variants))
    lines.append(f"plot {boxes}, $panel{index} using 1:2:3 with labels offset 0,0.7 font \",9\" notitle")
    return lines


def script(title, panels, variants, terminal, output):
    lines = [
        f"set terminal {terminal}",
        f'set output "{output}"',
        "set style fill solid 0.9 noborder",
        "set grid ytics lc rgb '#dddddd'",
        "set border 3 lc rgb '#888888'",
        "set ytics nomirror",
        "set key top left horizontal samplen 1",
        f'set multiplot layout 2,2 title "{title}" font ",14"',
    ]
    for index, panel in enumerate(panels):
        lines += _panel_lines(index, panel, variants)
    lines.append("unset multiplot")
    return "\n".join(lines) + "\n"


def draw(title, panels, variants, base):
    """Writes base.svg and base.png. Returns None, or why there is no picture."""
    title = title.replace('"', "'")
    for suffix, terminal in (("svg", "svg size 1100,760 dynamic enhanced font 'sans-serif,11' "
                                     "background '#ffffff'"),
                             ("png", "pngcairo size 1100,760 enhanced font 'sans,10'")):
        output = f"{base}.{suffix}"
        try:
            done = subprocess.run(["gnuplot"], input=script(title, panels, variants, terminal, output),
                                  text=True, capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"gnuplot: {error}"
        if done.returncode != 0:
            return "gnuplot: " + " ".join(done.stderr.split())
    return None
