package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

const (
	topLeast   = 100 * time.Millisecond // --interval
	topMost    = time.Hour
	topTimeout = 10 * time.Second // of one read: a connection that is dead without a word ends by it
)

func topCommand(g *global) *cobra.Command {
	var (
		interval time.Duration
		once     bool
		sort     string
	)
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch topics, groups and blockers",
		Long: `Shows topics, consumer groups and the transactions that hold messages up, read anew every --interval, until "q". Keys
move in the list, change the column that it is sorted by, filter it by name, and show a group's consumers; "?" lists them.
A lost connection is made again; until then the last figures stay, with the time since when.

Rates are a second, from the difference of two reads. RATE of a topic counts ids that were drawn, gaps included; of a group
those that it is done with: handled, passed over, or dead. A group that is moved shows a rate, too. UNSETTLED is how many
ids are above the settled head, which moves when a consumer looks. The other columns are those of "weir topic list" and
"weir group list"; CONSUMERS counts as "weir group describe" does, those that died within the hour included.

--once prints one sample, with rates over one interval, and ends; so it is with --output json, and where standard output is
no terminal.`,
		Example: "  weir top\n  weir top --interval 5s --sort dead\n  weir top --output json | jq '.groups[] | select(.lag > 1000) | .group'",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < topLeast || interval > topMost {
				return usageOf(cmd, "--interval is %v, it must be from %v to %v", interval, topLeast, short(topMost))
			}
			order := topOrder{column: slices.Index(topGroupNames(), sort)}
			if order.column < 0 {
				return usageOf(cmd, "--sort is %q, it must be one of %s", sort, strings.Join(topGroupNames(), ", "))
			}
			live := !once && !g.json() && isTerminal(g.stdout) && os.Getenv("TERM") != "dumb"
			logger := g.logger()
			if live {
				logger = slog.New(slog.DiscardHandler) // the screen says what there is to say
			}
			// It only reads: no maintenance, no LISTEN.
			client, err := weir.Open(cmd.Context(), g.dsn, &weir.Options{Schema: g.schema, Logger: logger, NoMaintenance: true, NoListen: true})
			if err != nil {
				return err
			}
			defer client.Close()
			if !live {
				return g.topOnce(cmd.Context(), client, interval, order)
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel() // a read that is under way
			model := newTopModel(func() (topSample, error) { return readTop(ctx, client) }, interval, order, g.colorOut)
			options := []tea.ProgramOption{tea.WithContext(ctx), tea.WithOutput(g.stdout), tea.WithoutSignalHandler(), tea.WithInput(g.in)}
			if !isTerminal(g.in) {
				options = append(options, tea.WithInput(nil))
			}
			_, err = tea.NewProgram(model, options...).Run()
			if ctx.Err() != nil && errors.Is(err, tea.ErrProgramKilled) {
				return nil
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&interval, "interval", time.Second, "time from one read to the next, 100ms to 1h")
	flags.BoolVar(&once, "once", false, "print one sample and end")
	flags.StringVar(&sort, "sort", "lag", "the column that groups are sorted by at first: "+strings.Join(topGroupNames(), ", "))
	complete(cmd, "sort", topGroupNames()...)
	return cmd
}

// topSample is what one read found.
type topSample struct {
	At       time.Time      `json:"at"`
	Seconds  float64        `json:"seconds"` // between the two reads that rates are from, 0 for a first one
	Topics   []topTopic     `json:"topics"`
	Groups   []topGroup     `json:"groups"`
	Blockers []weir.Blocker `json:"blockers"`

	began, groupsAt time.Time
}

type topTopic struct {
	topicJSON
	Rate *float64 `json:"rate"` // nil where there is no read before
}

type topGroup struct {
	weir.Group
	Rate      *float64            `json:"rate"`
	Consumers []weir.ConsumerInfo `json:"consumers"`
}

// key names a group among all.
func (g topGroup) key() string { return g.Topic + "\x00" + g.Name }

// done is what rises by one with each id that a group is done with.
func (g topGroup) done() int64 { return g.Committed - int64(g.Waiting) - int64(g.Retrying) }

// readTop sends the statements of the four listings, one after the other.
func readTop(ctx context.Context, client *weir.Client) (s topSample, err error) {
	ctx, cancel := context.WithTimeout(ctx, topTimeout)
	defer cancel()
	s.began = time.Now()
	topics, err := client.Topics(ctx)
	if err != nil {
		return s, err
	}
	s.At = time.Now()
	groups, err := client.Groups(ctx, "")
	if err != nil {
		return s, err
	}
	s.groupsAt = time.Now()
	consumers, err := client.Consumers(ctx, "", "")
	if err != nil {
		return s, err
	}
	blockers, err := client.Blockers(ctx, "")
	if err != nil {
		return s, err
	}
	s.Topics, s.Groups, s.Blockers = []topTopic{}, []topGroup{}, append([]weir.Blocker{}, blockers...)
	for _, t := range topics {
		s.Topics = append(s.Topics, topTopic{topicJSON: shownTopic(t)})
	}
	of := map[string][]weir.ConsumerInfo{}
	for _, c := range consumersInUTC(consumers) {
		key := topGroup{Group: weir.Group{Topic: c.Topic, Name: c.Group}}.key()
		of[key] = append(of[key], c)
	}
	for _, group := range groups {
		row := topGroup{Group: groupInUTC(group)}
		row.Consumers = append([]weir.ConsumerInfo{}, of[row.key()]...)
		s.Groups = append(s.Groups, row)
	}
	return s, nil
}

// since works the rates out from the sample before. A topic or group that was made in between, under a name that was there, has none.
func (s *topSample) since(before topSample) {
	s.Seconds = s.At.Sub(before.At).Seconds()
	perSecond := func(more int64, from, to time.Time) *float64 {
		seconds := to.Sub(from).Seconds()
		if seconds <= 0 {
			return nil
		}
		rate := float64(max(more, 0)) / seconds // less than before: it was moved back, or restored
		return &rate
	}
	topics := map[string]topTopic{}
	for _, t := range before.Topics {
		topics[t.Name] = t
	}
	for i := range s.Topics {
		t := &s.Topics[i]
		if was, found := topics[t.Name]; found && was.CreatedAt.Equal(t.CreatedAt) {
			t.Rate = perSecond(t.Head-was.Head, before.At, s.At)
		}
	}
	groups := map[string]topGroup{}
	for _, group := range before.Groups {
		groups[group.key()] = group
	}
	for i := range s.Groups {
		group := &s.Groups[i]
		if was, found := groups[group.key()]; found && was.CreatedAt.Equal(group.CreatedAt) {
			group.Rate = perSecond(group.done()-was.done(), before.groupsAt, s.groupsAt)
		}
	}
}

// topOnce prints one sample.
func (g *global) topOnce(ctx context.Context, client *weir.Client, interval time.Duration, order topOrder) error {
	before, err := readTop(ctx, client)
	if err != nil {
		return err
	}
	sleep(ctx, interval)
	if ctx.Err() != nil {
		return errors.New("interrupted before the second read, there is nothing to compare")
	}
	s, err := readTop(ctx, client)
	if err != nil {
		return err
	}
	s.since(before)
	s.At = s.At.UTC()
	s.Topics, s.Groups = sorted(s.Topics, topTopics, topTopicOrder), sorted(s.Groups, topGroups, order)
	return g.print(s, func() error {
		if err := g.table(topTable(s.Topics, topTopics, nil, 0)); err != nil {
			return err
		}
		fmt.Fprintln(g.out)
		if err := g.table(topTable(s.Groups, topGroups, nil, 0)); err != nil || len(s.Blockers) == 0 {
			return err
		}
		fmt.Fprintln(g.out)
		return printAll(g, s.Blockers, blockerHeader, blockerRow)
	})
}
