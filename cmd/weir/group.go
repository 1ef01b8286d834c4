package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func groupCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "group",
		Short:   "Create, list, describe, move and drop consumer groups",
		Long:    "A consumer group reads a topic from a cursor of its own. What each of these commands does, its own --help says.",
		Example: "  weir group create events audit\n  weir group list\n  weir group seek events audit beginning",
	}, groupCreateCommand(g), groupListCommand(g), groupDescribeCommand(g), groupSeekCommand(g), groupDropCommand(g))
}

func groupCreateCommand(g *global) *cobra.Command {
	var (
		o     weir.GroupOptions
		start string
	)
	cmd := &cobra.Command{
		Use:   "create TOPIC GROUP",
		Short: "Create a consumer group on a topic",
		Long: `Creates a consumer group on a topic. One of that name that exists is left as it is, whatever its options are.

` + positionHelp,
		Example: `  weir group create events audit
  weir group create events billing --start head --max-attempts 5 --retry-delay 10s`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.Start, err = parsePosition(start); err != nil {
				return err
			}
			for _, d := range []struct {
				name  string
				value *time.Duration
			}{{"retry-delay", &o.RetryDelay}, {"retry-max", &o.RetryMax}} {
				if *d.value < 0 {
					return usageOf(cmd, "--%s is %v, it must not be negative", d.name, *d.value)
				}
			}
			if cmd.Flags().Changed("retry-delay") && o.RetryDelay == 0 {
				o.RetryDelay = -1 // none
			}
			for _, name := range []string{"max-attempts", "split-after"} {
				if n, _ := cmd.Flags().GetInt(name); n == 0 && cmd.Flags().Changed(name) {
					return usageOf(cmd, "--%s is 0, it must be from 1 to 1000", name)
				}
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			if err := client.CreateGroup(cmd.Context(), args[0], args[1], &o); err != nil {
				return err
			}
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.done(groupInUTC(group), "group %q is there on topic %q, at id %d", group.Name, group.Topic, group.Claimed)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&start, "start", "beginning", "where a new group begins: a position")
	flags.IntVar(&o.MaxAttempts, "max-attempts", 0, "how often a message is tried before it is dead, 1 to 1000 (default 10)")
	flags.DurationVar(&o.RetryDelay, "retry-delay", 0, "time before the second attempt; it doubles with each further one (default 1s)")
	flags.DurationVar(&o.RetryMax, "retry-max", 0, "the longest time between two attempts (default 10m)")
	flags.IntVar(&o.SplitAfter, "split-after", 0, "takeovers of a range after which its messages are given out one by one (default 3)")
	return cmd
}

func groupListCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "list [TOPIC]",
		Short: "List consumer groups",
		Long: `Lists the consumer groups of a topic, or of all topics. CLAIMED is the highest id that was given out; at or below COMMITTED
everything is handled, between two attempts, or dead. LAG is the number of ids from there to the head, an upper bound of
the messages still to be handled; AGE is the age of the oldest of them.`,
		Example:           "  weir group list\n  weir group list events\n  weir group list --output json | jq 'select(.dead > 0)'",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			topic := ""
			if len(args) > 0 {
				topic = args[0]
				if _, err := client.Topic(cmd.Context(), topic); err != nil {
					return err // else a wrong name would look like a topic without groups
				}
			}
			groups, err := client.Groups(cmd.Context(), topic)
			if err != nil {
				return err
			}
			return printGroups(g, groups)
		},
	}
}

func printGroups(g *global, groups []weir.Group) error {
	for i := range groups {
		groups[i] = groupInUTC(groups[i])
	}
	return printAll(g, groups, "TOPIC GROUP MODE HEAD CLAIMED COMMITTED LAG AGE LEASES RETRYING DEAD", func(r weir.Group) []any {
		return []any{r.Topic, r.Name, r.Mode, r.Head, r.Claimed, r.Committed, r.Lag, lagAge(r), r.Leases, r.Retrying, r.Dead}
	})
}

func lagAge(group weir.Group) string {
	if group.LagSeconds <= 0 {
		return "-"
	}
	return time.Duration(group.LagSeconds * float64(time.Second)).Round(100 * time.Millisecond).String()
}

func groupInUTC(group weir.Group) weir.Group {
	group.CreatedAt = group.CreatedAt.UTC()
	return group
}

func groupDescribeCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:               "describe TOPIC GROUP",
		Short:             "Describe a consumer group",
		Long:              "Describes a consumer group: where it stands, what is in hand, what is between two attempts, and what is dead.",
		Example:           "  weir group describe events audit",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.print(groupInUTC(group), func() error {
				return g.describe(
					"topic", group.Topic,
					"group", group.Name,
					"mode", group.Mode,
					"head", group.Head,
					"settled head", group.Settled,
					"claimed", group.Claimed,
					"committed", group.Committed,
					"lag", fmt.Sprintf("%d, oldest %s", group.Lag, lagAge(group)),
					"leases", group.Leases,
					"retrying", group.Retrying,
					"dead", group.Dead,
					"max attempts", group.MaxAttempts,
					"created", timeText(group.CreatedAt))
			})
		},
	}
}

func groupSeekCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "seek TOPIC GROUP POSITION",
		Short: "Move a consumer group to a position",
		Long: `Moves a consumer group. Ranges that consumers hold end at once: running handlers finish and their acknowledgements are
refused. Messages between two attempts and dead letters stay.

` + positionHelp,
		Example:           "  weir group seek events audit beginning\n  weir group seek events audit 4711\n  weir group seek events audit 90m",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			to, err := parsePosition(args[2])
			if err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			was, err := client.Seek(cmd.Context(), args[0], args[1], to)
			if err != nil {
				return err
			}
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "group": args[1], "was": was, "claimed": group.Claimed},
				"group %q of topic %q was moved from id %d to %d", args[1], args[0], was, group.Claimed)
		},
	}
}

func groupDropCommand(g *global) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "drop TOPIC GROUP",
		Short: "Drop a consumer group with its retries and dead letters",
		Long: `Drops a consumer group with its cursor, its messages between two attempts and its dead letters, after asking; where there
is no terminal to ask on, --yes is needed. The topic keeps its messages. Running consumers of the group end.`,
		Example:           "  weir group drop events audit\n  weir group drop events audit --yes",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			err = g.confirm(cmd, yes, "Group %q of topic %q, with %s and %d being retried, will be dropped.",
				group.Name, group.Topic, count(group.Dead, "dead letter"), group.Retrying)
			if err != nil {
				return err
			}
			dropped, err := client.DropGroup(cmd.Context(), args[0], args[1])
			if err == nil && !dropped {
				err = fmt.Errorf("%w: %q on topic %q", weir.ErrGroupNotFound, args[1], args[0])
			}
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "group": args[1], "dropped": true}, "group %q of topic %q was dropped", args[1], args[0])
		},
	}
	yesFlag(cmd, &yes)
	return cmd
}
