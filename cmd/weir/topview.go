package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"charm.land/bubbles/v2/help"
	"charm.land/bubbles/v2/key"
	"charm.land/bubbles/v2/textinput"
	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
)

// This file is the screen of "weir top".

// topColumn is a column of a list: what it shows, and how it sorts.
type topColumn[T any] struct {
	head    string
	cell    func(T) any
	compare func(a, b T) int
	text    bool
}

func textColumn[T any](head string, value func(T) string) topColumn[T] {
	return topColumn[T]{head, func(row T) any { return value(row) }, func(a, b T) int { return cmp.Compare(value(a), value(b)) }, true}
}

// numberColumn sorts by value; show is nil for a whole number.
func numberColumn[T any](head string, value func(T) float64, show func(T) any) topColumn[T] {
	if show == nil {
		show = func(row T) any { return int64(value(row)) }
	}
	return topColumn[T]{head, show, func(a, b T) int { return cmp.Compare(value(b), value(a)) }, false} // the most first
}

var topTopics = []topColumn[topTopic]{
	textColumn("TOPIC", func(t topTopic) string { return t.Name }),
	numberColumn("RATE", func(t topTopic) float64 { return rateOf(t.Rate) }, func(t topTopic) any { return rateText(t.Rate) }),
	numberColumn("HEAD", func(t topTopic) float64 { return float64(t.Head) }, nil),
	numberColumn("UNSETTLED", func(t topTopic) float64 { return float64(max(t.Head-t.Settled, 0)) }, nil),
	numberColumn("MESSAGES", func(t topTopic) float64 { return float64(t.Messages) }, nil),
	numberColumn("BYTES", func(t topTopic) float64 { return float64(t.Bytes) }, func(t topTopic) any { return number(sizeText(t.Bytes)) }),
	numberColumn("GROUPS", func(t topTopic) float64 { return float64(t.Groups) }, nil),
}

// topTopicOrder is that of topics at first: by rate.
var topTopicOrder = topOrder{column: 1}

var topGroups = []topColumn[topGroup]{
	textColumn("TOPIC", func(g topGroup) string { return g.Topic }),
	textColumn("GROUP", func(g topGroup) string { return g.Name }),
	textColumn("MODE", func(g topGroup) string { return string(g.Mode) }),
	numberColumn("LAG", func(g topGroup) float64 { return float64(g.Lag) }, nil),
	numberColumn("AGE", func(g topGroup) float64 { return g.LagSeconds }, func(g topGroup) any { return number(lagAge(g.Group)) }),
	numberColumn("RATE", func(g topGroup) float64 { return rateOf(g.Rate) }, func(g topGroup) any { return rateText(g.Rate) }),
	numberColumn("LEASES", func(g topGroup) float64 { return float64(g.Leases) }, nil),
	numberColumn("WAITING", func(g topGroup) float64 { return float64(g.Waiting) }, nil),
	numberColumn("RETRYING", func(g topGroup) float64 { return float64(g.Retrying) }, nil),
	numberColumn("DEAD", func(g topGroup) float64 { return float64(g.Dead) }, nil),
	numberColumn("CONSUMERS", func(g topGroup) float64 { return float64(len(g.Consumers)) }, nil),
	textColumn("PAUSED", func(g topGroup) string { return orDash(g.PausedAt) }),
}

// topGroupNames are the columns that groups can be sorted by, as --sort takes them.
func topGroupNames() (names []string) {
	for _, c := range topGroups {
		names = append(names, strings.ToLower(c.head))
	}
	return names
}

func rateOf(rate *float64) float64 {
	if rate == nil {
		return -1
	}
	return *rate
}

func rateText(rate *float64) number {
	switch {
	case rate == nil:
		return "-"
	case *rate > 0 && *rate < 10:
		return number(fmt.Sprintf("%.1f", *rate))
	}
	return number(fmt.Sprintf("%.0f", *rate))
}

// topOrder is what a list is sorted by.
type topOrder struct {
	column   int
	reversed bool
}

// sorted is a list in that order; what is equal keeps its place.
func sorted[T any](rows []T, columns []topColumn[T], o topOrder) []T {
	rows = slices.Clone(rows)
	slices.SortStableFunc(rows, func(a, b T) int {
		if o.reversed {
			a, b = b, a
		}
		return columns[o.column].compare(a, b)
	})
	return rows
}

// topTable is a list as a table. The column that it is sorted by is marked where order is given; longest limits texts, 0 does not.
func topTable[T any](rows []T, columns []topColumn[T], order *topOrder, longest int) (header []string, cells [][]any) {
	for i, c := range columns {
		head := c.head
		if order != nil && order.column == i {
			head += map[bool]string{false: "\u2193", true: "\u2191"}[order.reversed != c.text] // arrow down, up
		}
		header = append(header, head)
	}
	cells = make([][]any, len(rows))
	for i, row := range rows {
		for _, c := range columns {
			cell := c.cell(row)
			if text, ok := cell.(string); ok && longest > 0 {
				cell = ansi.Truncate(visible(text), longest, "\u2026")
			}
			cells[i] = append(cells[i], cell)
		}
	}
	return header, cells
}

var topKeys = struct {
	up, down, pageUp, pageDown, first, last, left, right, reverse, list, open, back, filter, help, suspend, quit key.Binding
}{
	up:       binding("k/\u2191", "up", "up", "k"),
	down:     binding("j/\u2193", "down", "down", "j"),
	pageUp:   binding("pgup", "page up", "pgup", "ctrl+b"),
	pageDown: binding("pgdn", "page down", "pgdown", "ctrl+f"),
	first:    binding("g", "first", "home", "g"),
	last:     binding("G", "last", "end", "G"),
	left:     binding("h/\u2190", "sort by the column before", "left", "h"),
	right:    binding("l/\u2192", "sort", "right", "l", "s"),
	reverse:  binding("r", "reverse", "r"),
	list:     binding("tab", "topics or groups", "tab"),
	open:     binding("enter", "consumers", "enter"),
	back:     binding("esc", "back, no filter", "esc", "backspace"),
	filter:   binding("/", "filter", "/"),
	help:     binding("?", "all keys", "?"),
	suspend:  binding("ctrl+z", "suspend", "ctrl+z"),
	quit:     binding("q", "quit", "q", "ctrl+c"),
}

func binding(name, does string, keys ...string) key.Binding {
	return key.NewBinding(key.WithKeys(keys...), key.WithHelp(name, does))
}

// topList is where somebody is in a list.
type topList struct {
	order topOrder
	index int
	key   string // of the row that was moved to, "" for the first, whichever that is
}

// find has the cursor on the row that it was moved to, or where that was.
func (l *topList) find(keys []string) {
	if at := slices.Index(keys, l.key); at >= 0 {
		l.index = at
	} else if l.key == "" {
		l.index = 0
	}
	l.index = max(min(l.index, len(keys)-1), 0)
}

func (l *topList) move(keys []string, by int) {
	l.find(keys)
	if len(keys) > 0 {
		l.index = max(min(l.index+by, len(keys)-1), 0)
		l.key = keys[l.index]
	}
}

// topModel is the state of the screen.
type topModel struct {
	read     func() (topSample, error)
	interval time.Duration
	color    bool

	width, height  int
	sample         *topSample
	lostSince      time.Time
	lost           error
	groups, topics topList
	onTopics       bool // the cursor is in the topics
	filter         textinput.Model
	opened         string // key of the group whose consumers are shown
	consumers      topList
	help           help.Model
}

// topFailed is a read that failed.
type topFailed struct {
	began time.Time
	err   error
}

// topDue says that it is time for a read.
type topDue struct{}

func newTopModel(read func() (topSample, error), interval time.Duration, order topOrder, color bool) *topModel {
	m := &topModel{read: read, interval: interval, color: color, width: 80, height: 24, filter: textinput.New(), help: help.New()}
	m.groups.order, m.topics.order = order, topTopicOrder
	m.filter.Prompt = "/"
	m.filter.CharLimit = 200
	m.filter.SetVirtualCursor(false)
	m.filter.SetStyles(textinput.Styles{})
	m.help.Styles = help.Styles{}
	return m
}

func (m *topModel) Init() tea.Cmd { return m.next }

// next reads. It runs beside Update, once at a time.
func (m *topModel) next() tea.Msg {
	began := time.Now()
	s, err := m.read()
	if err != nil {
		return topFailed{began, err}
	}
	return s
}

// wait is the time until the next read. A read that takes longer than the interval is followed by the next at once.
func (m *topModel) wait(began time.Time) tea.Cmd {
	return tea.Tick(max(time.Until(began.Add(m.interval)), 0), func(time.Time) tea.Msg { return topDue{} })
}

func (m *topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case topDue:
		return m, m.next
	case topSample:
		if m.sample != nil {
			msg.since(*m.sample)
		}
		m.sample, m.lost, m.lostSince = &msg, nil, time.Time{}
		return m, m.wait(msg.began)
	case topFailed:
		if m.lost == nil {
			m.lostSince = msg.began
		}
		m.lost = msg.err
		return m, m.wait(msg.began)
	case tea.KeyPressMsg:
		if m.filter.Focused() {
			return m, m.filterKey(msg)
		}
		return m, m.key(msg)
	default:
		if m.filter.Focused() { // what is pasted, and the like
			var cmd tea.Cmd
			m.filter, cmd = m.filter.Update(msg)
			return m, cmd
		}
	}
	return m, nil
}

func (m *topModel) filterKey(msg tea.KeyPressMsg) (cmd tea.Cmd) {
	switch msg.String() {
	case "ctrl+c":
		return tea.Quit
	case "esc":
		m.filter.Reset()
		m.filter.Blur()
	case "enter", "up", "down":
		m.filter.Blur()
	default:
		m.filter, cmd = m.filter.Update(msg)
	}
	return cmd
}

func (m *topModel) key(msg tea.KeyPressMsg) tea.Cmd {
	list, keys, columns := &m.groups, m.groupKeys(), len(topGroups)
	switch {
	case m.opened != "":
		list, keys, columns = &m.consumers, m.consumerKeys(), 0
	case m.onTopics:
		list, keys, columns = &m.topics, m.topicKeys(), len(topTopics)
	}
	page := max(m.height/2, 1)
	switch k := topKeys; {
	case key.Matches(msg, k.quit):
		return tea.Quit
	case key.Matches(msg, k.suspend):
		return tea.Suspend
	case key.Matches(msg, k.help):
		m.help.ShowAll = !m.help.ShowAll
	case key.Matches(msg, k.up):
		list.move(keys, -1)
	case key.Matches(msg, k.down):
		list.move(keys, 1)
	case key.Matches(msg, k.pageUp):
		list.move(keys, -page)
	case key.Matches(msg, k.pageDown):
		list.move(keys, page)
	case key.Matches(msg, k.first):
		list.key = ""
	case key.Matches(msg, k.last):
		list.move(keys, len(keys))
	case key.Matches(msg, k.back):
		if m.opened != "" {
			m.opened = ""
		} else {
			m.filter.Reset()
		}
	case key.Matches(msg, k.open) && m.opened != "":
		m.opened = ""
	case columns == 0: // the rest is for the lists that are sorted
	case key.Matches(msg, k.left):
		list.order = topOrder{column: (list.order.column + columns - 1) % columns}
	case key.Matches(msg, k.right):
		list.order = topOrder{column: (list.order.column + 1) % columns}
	case key.Matches(msg, k.reverse):
		list.order.reversed = !list.order.reversed
	case key.Matches(msg, k.list):
		m.onTopics = !m.onTopics
	case key.Matches(msg, k.filter):
		return m.filter.Focus()
	case key.Matches(msg, k.open) && !m.onTopics && len(keys) > 0:
		list.find(keys)
		m.opened, m.consumers = keys[list.index], topList{}
	}
	return nil
}

// matches reports whether one of the names has what is filtered by.
func (m *topModel) matches(names ...string) bool {
	part := strings.ToLower(m.filter.Value())
	return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(strings.ToLower(name), part) })
}

// shownTopics, shownGroups are those that the filter leaves, in order.
func (m *topModel) shownTopics() (rows []topTopic) {
	if m.sample == nil {
		return nil
	}
	for _, t := range m.sample.Topics {
		of := func(g topGroup) bool { return g.Topic == t.Name && m.matches(g.Name) }
		if m.matches(t.Name) || slices.ContainsFunc(m.sample.Groups, of) {
			rows = append(rows, t)
		}
	}
	return sorted(rows, topTopics, m.topics.order)
}

func (m *topModel) shownGroups() (rows []topGroup) {
	if m.sample == nil {
		return nil
	}
	for _, g := range m.sample.Groups {
		if m.matches(g.Topic, g.Name) {
			rows = append(rows, g)
		}
	}
	return sorted(rows, topGroups, m.groups.order)
}

// group is the one whose consumers are shown, nil if it is gone.
func (m *topModel) group() *topGroup {
	if m.sample != nil {
		for i := range m.sample.Groups {
			if g := &m.sample.Groups[i]; g.key() == m.opened {
				return g
			}
		}
	}
	return nil
}

func (m *topModel) topicKeys() (keys []string) {
	for _, t := range m.shownTopics() {
		keys = append(keys, t.Name)
	}
	return keys
}

func (m *topModel) groupKeys() (keys []string) {
	for _, g := range m.shownGroups() {
		keys = append(keys, g.key())
	}
	return keys
}

func (m *topModel) consumerKeys() (keys []string) {
	if g := m.group(); g != nil {
		for _, c := range g.Consumers {
			keys = append(keys, c.Name)
		}
	}
	return keys
}

func (m *topModel) View() tea.View {
	lines, cursor := m.lines()
	for i := range lines {
		lines[i] = ansi.Truncate(lines[i], m.width, "")
	}
	v := tea.NewView(strings.Join(lines[:min(len(lines), m.height)], "\n"))
	v.AltScreen = true
	v.WindowTitle = "weir top"
	if c := m.filter.Cursor(); c != nil {
		c.Y = cursor
		v.Cursor = c
	}
	return v
}

// lines are the whole screen. cursor is the line of the filter.
func (m *topModel) lines() (lines []string, cursor int) {
	title := paint(m.color, bold, "weir top") + "  every " + short(m.interval)
	if s := m.sample; s != nil {
		title = fmt.Sprintf("%s  %s  %s, %s, %s", title, s.At.Format(time.TimeOnly),
			count(len(s.Topics), "topic"), count(len(s.Groups), "group"), count(len(s.Blockers), "blocker"))
	}
	lines = append(lines, title)
	if m.lost != nil {
		text := fmt.Sprintf("nothing could be read since %s: %s", m.lostSince.Format(time.TimeOnly), visible(m.lost.Error()))
		for line := range strings.SplitSeq(ansi.Wrap(text, max(m.width, 20), ""), "\n") {
			lines = append(lines, paint(m.color, red, line))
		}
	}
	if m.filter.Focused() || m.filter.Value() != "" {
		cursor = len(lines)
		lines = append(lines, m.filter.View())
	}
	lines = append(lines, "")
	foot := m.foot()
	body := max(m.height-len(lines)-len(foot), 1)
	var content []string
	switch {
	case m.sample == nil:
	case m.opened != "":
		content = m.consumersView(body)
	default:
		content = m.listsView(body)
	}
	lines = append(lines, content[:min(len(content), body)]...)
	for len(lines) < m.height-len(foot) {
		lines = append(lines, "")
	}
	return append(lines, foot...), cursor
}

// foot names the keys.
func (m *topModel) foot() []string {
	k := topKeys
	m.help.SetWidth(m.width)
	if m.help.ShowAll {
		text := m.help.FullHelpView([][]key.Binding{
			{k.up, k.down, k.pageUp, k.pageDown},
			{k.first, k.last, k.left, binding("l/\u2192", "by the one after")},
			{k.reverse, k.list, k.open, k.back},
			{k.filter, k.help, k.suspend, k.quit},
		})
		return append([]string{""}, strings.Split(text, "\n")...)
	}
	keys := []key.Binding{k.quit, k.up, k.down, k.right, k.reverse, k.filter, k.open, k.list, k.help}
	if m.opened != "" {
		keys = []key.Binding{k.quit, k.back, k.up, k.down, k.help}
	}
	return []string{"", paint(m.color, dim, m.help.ShortHelpView(keys))}
}

// listsView is topics, groups and blockers: topics have up to a third of the height, blockers a few lines.
func (m *topModel) listsView(height int) (lines []string) {
	// Names are cut where they would push the figures out.
	longest := max((m.width-80)/2, 12)
	topics, groups := m.shownTopics(), m.shownGroups()
	m.topics.find(m.topicKeys())
	m.groups.find(m.groupKeys())
	var blockers []string
	if list := m.sample.Blockers; len(list) > 0 {
		rows := make([][]any, len(list))
		for i, b := range list {
			rows[i] = blockerRow(b)
		}
		blockers = append([]string{""}, m.table(strings.Fields(blockerHeader), rows, 6, -1)...)
	}
	header, rows := topTable(topics, topTopics, &m.topics.order, longest)
	at := -1
	if m.onTopics {
		at = m.topics.index
	}
	lines = append(m.table(header, rows, max(height/3, 3), at), "")
	header, rows = topTable(groups, topGroups, &m.groups.order, longest)
	if at = -1; !m.onTopics {
		at = m.groups.index
	}
	lines = append(lines, m.table(header, rows, max(height-len(lines)-len(blockers), 2), at)...)
	return append(lines, blockers...)
}

func (m *topModel) consumersView(height int) (lines []string) {
	topic, name, _ := strings.Cut(m.opened, "\x00")
	group := m.group()
	if group == nil {
		return []string{fmt.Sprintf("group %q of topic %q is gone", name, topic)}
	}
	header, rows := topTable([]topGroup{*group}, topGroups, nil, max((m.width-80)/2, 12))
	lines = append(m.table(header, rows, 2, -1), "")
	if len(group.Consumers) == 0 {
		return append(lines, "  no consumer runs or holds anything")
	}
	m.consumers.find(m.consumerKeys())
	rows = nil
	for _, c := range group.Consumers {
		rows = append(rows, consumerRow(c))
	}
	return append(lines, m.table(strings.Fields(consumerHeader), rows, max(height-len(lines), 2), m.consumers.index)...)
}

// table is a table of at most so many lines: those around the row at the cursor, which is -1 where that is elsewhere.
func (m *topModel) table(header []string, rows [][]any, height, cursor int) []string {
	all := columns(header, rows)
	most := max(height-1, 1)
	from := max(min(max(cursor, 0)-most/2, len(rows)-most), 0)
	to := min(from+most, len(rows))
	head := paint(m.color, bold, all[0])
	if to-from < len(rows) {
		head += fmt.Sprintf("  (%d to %d of %d)", from+1, to, len(rows))
	}
	lines := []string{"  " + head}
	for i := from; i < to; i++ {
		if line := all[i+1]; i == cursor {
			lines = append(lines, paint(m.color, reverse, "> "+line))
		} else {
			lines = append(lines, "  "+line)
		}
	}
	return lines
}
